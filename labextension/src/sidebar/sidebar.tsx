/** The right-hand panel: the devices, the workers and the options of the current notebook's kernel. */

import type { ISessionContext } from '@jupyterlab/apputils';
import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import type { TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import { SidebarChannel, type ChannelState } from '../channel';
import { SidebarView } from './view';

export class Sidebar extends ReactWidget {
  constructor(
    private readonly tracker: INotebookTracker,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('accel-nb-sidebar');
    tracker.currentChanged.connect(this.onNotebook, this);
    this.onNotebook(tracker, tracker.currentWidget);
  }

  /** Look again when a cell has run that may have loaded the extension. */
  onExecuted(notebook: NotebookPanel['content'], source: string): void {
    const isHere = this.tracker.currentWidget?.content === notebook;
    if (isHere && source.includes('accel') && this.channel !== null) {
      if (this.channel.state.kind === 'not-loaded') {
        this.channel.connect();
      } else {
        this.channel.refresh();
      }
    }
  }

  override dispose(): void {
    this.follow(null);
    super.dispose();
  }

  protected override render(): React.JSX.Element {
    const state: ChannelState = this.channel?.state ?? { kind: 'no-kernel' };
    return (
      <SidebarView
        state={state}
        trans={this.trans}
        onRun={code => void this.channel?.run(code)}
        onRefresh={() => this.channel?.refresh()}
      />
    );
  }

  private onNotebook(_tracker: INotebookTracker, panel: NotebookPanel | null): void {
    this.follow(panel?.sessionContext ?? null);
  }

  private follow(session: ISessionContext | null): void {
    this.channel?.dispose();
    this.channel = session === null ? null : new SidebarChannel(session);
    this.channel?.stateChanged.connect(this.onState, this);
    if (!this.isDisposed) {
      this.update();
    }
  }

  private onState(): void {
    this.update();
  }

  private channel: SidebarChannel | null = null;
}
