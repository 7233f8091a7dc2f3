/** The right-hand panel: devices, workers, options, forecast and logs of the current notebook's kernel. */

import type { ITranslator, TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import type { NotebookSessions } from './sessions';
import { SidebarView } from './sidebarView';

export class Sidebar extends ReactWidget {
  constructor(
    private readonly sessions: NotebookSessions,
    private readonly trans: TranslationBundle,
    private readonly translator: ITranslator
  ) {
    super();
    this.addClass('accel-nb-sidebar');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('Accelerated training'));
    sessions.changed.connect(this.onChanged, this);
  }

  protected override render(): React.JSX.Element {
    return (
      <SidebarView
        session={this.sessions.current}
        trans={this.trans}
        translator={this.translator}
      />
    );
  }

  protected override onAfterShow(): void {
    this.update();
  }

  private onChanged(): void {
    if (this.isVisible) {
      this.update();
    }
  }
}
