/** The open notebooks and the current one among them. Each keeps its line to its kernel while another is looked at. */

import type { INotebookTracker, NotebookPanel } from '@jupyterlab/notebook';
import { Signal, type ISignal } from '@lumino/signaling';
import { NotebookSession } from './session';

export class NotebookSessions {
  constructor(private readonly tracker: INotebookTracker) {
    tracker.forEach(panel => this.add(panel));
    tracker.widgetAdded.connect((_, panel) => this.add(panel), this);
    tracker.currentChanged.connect(this.onCurrent, this);
    this.onCurrent();
  }

  get current(): NotebookSession | null {
    return this.shown;
  }

  /** Emitted when the current notebook is another one, or has changed. */
  get changed(): ISignal<this, void> {
    return this.hasChanged;
  }

  private add(panel: NotebookPanel): void {
    const session = new NotebookSession(panel, () => this.followsForecast);
    this.sessions.set(panel, session);
    session.changed.connect(this.onChanged, this);
    panel.disposed.connect(() => {
      this.sessions.delete(panel);
      session.dispose();
    }, this);
    this.onCurrent();
  }

  private onCurrent(): void {
    const panel = this.tracker.currentWidget;
    const next = (panel && this.sessions.get(panel)) ?? null;
    if (next !== this.shown) {
      if (this.shown !== null && !this.shown.isDisposed) {
        this.shown.channel.watch(false);
      }
      this.shown = next;
      next?.channel.watch(true);
    }
    this.hasChanged.emit();
  }

  private onChanged(session: NotebookSession): void {
    if (session === this.shown) {
      this.hasChanged.emit();
    }
  }

  /** Whether forecasts follow the form once one was asked for. */
  followsForecast = true;

  private shown: NotebookSession | null = null;
  private readonly sessions = new Map<NotebookPanel, NotebookSession>();
  private readonly hasChanged = new Signal<this, void>(this);
}
