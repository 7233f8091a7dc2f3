/** The status bar's item: the number of workers and the memory in use; a click opens the sidebar. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import { formatBytes } from '../chart/format';
import type { ISidebarState } from '../model/sidebarState';
import { poolText } from './poolText';
import type { NotebookSessions } from './sessions';

export class StatusItem extends ReactWidget {
  constructor(
    private readonly sessions: NotebookSessions,
    private readonly trans: TranslationBundle,
    private readonly onOpen: () => void
  ) {
    super();
    this.addClass('accel-nb-status-item');
    sessions.changed.connect(this.onChanged, this);
  }

  /** Whether there is something to show. */
  get isActive(): boolean {
    return this.sessions.current?.channel.state.kind === 'ready';
  }

  protected override render(): React.JSX.Element | null {
    const state = this.sessions.current?.channel.state;
    if (state?.kind !== 'ready') {
      return null;
    }
    const [text, title] = statusTexts(state.info, this.trans);
    return (
      <button type="button" title={title} onClick={this.onOpen}>
        {text}
      </button>
    );
  }

  private onChanged(): void {
    this.update();
  }
}

/** The item's text and title. The memory is the sum over all GPUs if there are any, else the machine's. */
function statusTexts(info: ISidebarState, trans: TranslationBundle): [string, string] {
  const gpus = info.devices.filter(device => device.kind !== 'cpu');
  const devices = gpus.length > 0 ? gpus : info.devices;
  const total = devices.reduce((sum, device) => sum + device.totalBytes, 0);
  const free = devices.reduce((sum, device) => sum + device.freeBytes, 0);
  const workers =
    info.workers.length > 0
      ? trans._n('%1 worker', '%1 workers', info.workers.length)
      : trans.__('no workers');
  const memory = total > 0 ? ` · ${formatBytes(total - free)} / ${formatBytes(total)}` : '';
  const done = info.run?.fraction ?? null;
  const progress = done === null ? '' : ` · ${Math.round(100 * done)} %`;
  return [
    `${workers}${memory}${progress}`,
    trans.__('accel_nb: %1. Open the sidebar.', poolText(info.pool, trans))
  ];
}
