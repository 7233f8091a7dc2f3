/** The open notebooks, and the current one. Each keeps the connection to its kernel while another one is current. */

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

  /** Emitted when another notebook becomes the current one, and when the state of the current one changes. */
  get changed(): ISignal<this, void> {
    return this.changedSignal;
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
    this.changedSignal.emit();
  }

  private onChanged(session: NotebookSession): void {
    if (session === this.shown) {
      this.changedSignal.emit();
    }
  }

  /** Whether a forecast, once requested, is computed again after changes in the form. */
  followsForecast = true;

  private shown: NotebookSession | null = null;
  private readonly sessions = new Map<NotebookPanel, NotebookSession>();
  private readonly changedSignal = new Signal<this, void>(this);
}
