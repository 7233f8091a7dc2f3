/** The sidebar's content for the current notebook. React escapes text from kernels and files. */

import type { ITranslator, TranslationBundle } from '@jupyterlab/translation';
import { ForecastView } from './forecastView';
import { KernelView } from './kernelView';
import { LogView } from './logView';
import { OptionsForm } from './optionsForm';
import { RunsView } from './runsView';
import type { NotebookSession } from './session';

export function SidebarView({
  session,
  trans,
  translator
}: {
  readonly session: NotebookSession | null;
  readonly trans: TranslationBundle;
  readonly translator: ITranslator;
}): React.JSX.Element {
  const state = session?.channel.state ?? { kind: 'no-kernel' as const };
  return (
    <div className="accel-nb-sidebar-content" data-state={state.kind}>
      {session === null ? (
        <p className="accel-nb-hint">
          {trans.__('Open a notebook to see its devices, workers and options here.')}
        </p>
      ) : (
        <>
          <KernelView session={session} trans={trans} />
          <OptionsForm session={session} trans={trans} translator={translator} />
          {state.kind === 'ready' && (
            <>
              <ForecastView session={session} trans={trans} />
              <RunsView session={session} trans={trans} />
              <LogView session={session} trans={trans} logs={state.info.logs} />
            </>
          )}
        </>
      )}
    </div>
  );
}
