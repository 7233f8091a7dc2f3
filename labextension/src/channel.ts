/** The line to the accel_nb extension in one notebook's kernel. The kernel's side is `accel_nb/ui/comm.py`. */

import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import { Signal, type ISignal } from '@lumino/signaling';
import { parseSidebarState, type ISidebarState } from './model/sidebarState';

export const COMM_TARGET = 'accel_nb.sidebar';

/** Exactly one of these holds at a time. */
export type ChannelState =
  | { readonly kind: 'no-kernel' }
  | { readonly kind: 'connecting' }
  | { readonly kind: 'not-loaded' }
  | { readonly kind: 'ready'; readonly info: ISidebarState };

/**
 * Follows one session's kernel through restarts and changes.
 *
 * A kernel without the extension closes the comm at once; that is how "not loaded" is told.
 */
export class SidebarChannel {
  constructor(private readonly session: ISessionContext) {
    session.kernelChanged.connect(this.onKernelChanged, this);
    session.statusChanged.connect(this.onStatusChanged, this);
    this.connect();
  }

  get state(): ChannelState {
    return this.current;
  }

  get stateChanged(): ISignal<this, ChannelState> {
    return this.changed;
  }

  /** Open the comm anew: after `%load_ext`, a restart, or when the user asks. */
  connect(): void {
    this.drop();
    const kernel = this.session.session?.kernel ?? null;
    if (kernel === null || kernel.isDisposed) {
      this.set({ kind: 'no-kernel' });
      return;
    }
    this.set({ kind: 'connecting' });
    const comm = kernel.createComm(COMM_TARGET);
    this.comm = comm;
    comm.onMsg = message => this.take(comm, message);
    comm.onClose = () => {
      if (this.comm === comm) {
        this.comm = null;
        this.set({ kind: 'not-loaded' });
      }
    };
    comm.open();
  }

  /** Ask for the state anew. */
  refresh(): void {
    if (this.comm === null) {
      this.connect();
    } else {
      this.comm.send({ kind: 'refresh' });
    }
  }

  /** Run a line magic in the kernel, after the cells that wait there, then look again. */
  async run(code: string): Promise<void> {
    const kernel = this.session.session?.kernel;
    if (!kernel) {
      return;
    }
    await kernel.requestExecute({ code, store_history: false }).done;
    if (!this.isDisposed) {
      this.refresh();
    }
  }

  get isDisposed(): boolean {
    return this.disposed;
  }

  dispose(): void {
    if (!this.disposed) {
      this.disposed = true;
      this.drop();
      Signal.clearData(this);
    }
  }

  private onKernelChanged(): void {
    this.connect();
  }

  private onStatusChanged(_session: ISessionContext, status: Kernel.Status): void {
    if (status === 'restarting' || status === 'autorestarting') {
      this.drop();
      this.set({ kind: 'connecting' });
      this.isRestarting = true;
    } else if (status === 'idle' && this.isRestarting) {
      this.isRestarting = false;
      this.connect();
    }
  }

  private take(comm: Kernel.IComm, message: KernelMessage.ICommMsgMsg): void {
    if (this.comm !== comm) {
      return;
    }
    const info = parseSidebarState(message.content.data);
    if (info === null) {
      console.warn('accel_nb: dropped a sidebar message that is not one of this version');
    } else {
      this.set({ kind: 'ready', info });
    }
  }

  private drop(): void {
    const comm = this.comm;
    this.comm = null;
    if (comm !== null && !comm.isDisposed) {
      comm.dispose();
    }
  }

  private set(state: ChannelState): void {
    this.current = state;
    this.changed.emit(state);
  }

  private comm: Kernel.IComm | null = null;
  private current: ChannelState = { kind: 'no-kernel' };
  private isRestarting = false;
  private disposed = false;
  private readonly changed = new Signal<this, ChannelState>(this);
}
