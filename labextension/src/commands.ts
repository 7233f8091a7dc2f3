/** Commands for the command palette: the actions of the sidebar's buttons, for the current notebook. */

import type { ICommandPalette } from '@jupyterlab/apputils';
import type { TranslationBundle } from '@jupyterlab/translation';
import type { CommandRegistry } from '@lumino/commands';
import type { ChannelState } from './channel';
import type { NotebookSession } from './sidebar/session';
import type { NotebookSessions } from './sidebar/sessions';

export function addCommands(
  commands: CommandRegistry,
  palette: ICommandPalette | null,
  sessions: NotebookSessions,
  trans: TranslationBundle,
  open: () => void
): void {
  const category = trans.__('Accelerated Training');

  const add = (
    name: string,
    label: string,
    act: (session: NotebookSession) => unknown,
    isEnabled: (state: ChannelState) => boolean
  ): void => {
    const id = `accel-nb:${name}`;
    commands.addCommand(id, {
      label,
      describedBy: { args: { type: 'object', properties: {} } },
      isEnabled: () => sessions.current !== null && isEnabled(sessions.current.channel.state),
      execute: () => (sessions.current === null ? undefined : act(sessions.current))
    });
    palette?.addItem({ command: id, category });
  };

  commands.addCommand('accel-nb:show-sidebar', {
    label: trans.__('Show Accelerated Training'),
    describedBy: { args: { type: 'object', properties: {} } },
    execute: open
  });
  palette?.addItem({ command: 'accel-nb:show-sidebar', category });

  const isReady = (state: ChannelState): boolean => state.kind === 'ready';
  const isBusy = (state: ChannelState): boolean =>
    state.kind === 'ready' && state.info.pool === 'busy';
  const isAlways = (): boolean => true;
  add(
    'load',
    trans.__('Load accel_nb into the Kernel'),
    session => session.load(),
    state => state.kind === 'not-loaded'
  );
  add(
    'insert',
    trans.__('Insert %%accelerate into the Cell'),
    session => session.insert(),
    isAlways
  );
  add('start', trans.__('Start Workers'), session => session.start(), isReady);
  add('interrupt', trans.__('Interrupt Workers'), session => session.interrupt(), isBusy);
  add('restart', trans.__('Restart Workers'), session => session.restart(), isReady);
  add('stop', trans.__('Stop Workers'), session => session.stop(), isReady);
  add('forecast', trans.__('Forecast Memory'), session => session.requestForecast(), isReady);
}
