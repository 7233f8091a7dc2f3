/** The comm between the sidebar and the accel_nb extension in a notebook's kernel, whose side is `accel_nb/ui/comm.py`. */

import type { ISessionContext } from '@jupyterlab/apputils';
import { KernelMessage, type Kernel } from '@jupyterlab/services';
import type { JSONObject } from '@lumino/coreutils';
import { Signal, type ISignal } from '@lumino/signaling';
import { capText } from './chart/format';
import { parseReply, parseSidebarState, type ISidebarState } from './model/sidebarState';

const COMM_TARGET = 'accel_nb.sidebar';

const RENEW_MS = 20_000;
const MAX_PRINTED = 1 << 20;
const MAX_TRIES = 3;
const KERNEL_ENDED = 'the kernel was restarted or has ended';

/** The state of the connection to the extension in the kernel. */
export type ChannelState =
  | { readonly kind: 'no-kernel' }
  | { readonly kind: 'connecting' }
  | { readonly kind: 'not-loaded' }
  /** The kernel runs no Python, or another notebook of this page has its comms. */
  | { readonly kind: 'foreign'; readonly reason: 'language' | 'shared' }
  | { readonly kind: 'ready'; readonly info: ISidebarState };

/** The result of a line magic: its output, or its error. */
export type RunResult =
  { readonly ok: true; readonly printed: string } | { readonly ok: false; readonly error: string };

/**
 * Follows one session's kernel through restarts and changes.
 *
 * A kernel without the extension closes the comm at once; the state is then `not-loaded`. When the extension is loaded
 * later, the kernel opens a new comm.
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
    return this.stateChangedSignal;
  }

  /** Emitted when the connection to a kernel's extension has been established. */
  get connected(): ISignal<this, void> {
    return this.connectedSignal;
  }

  /** Open a new comm: after a restart, or on the user's request. */
  connect(): void {
    this.closeComm();
    const kernel = this.session.session?.kernel ?? null;
    if (kernel === null || kernel.isDisposed) {
      this.set({ kind: 'no-kernel' });
      return;
    }
    if (!kernel.handleComms) {
      this.set({ kind: 'foreign', reason: 'shared' });
      return;
    }
    this.set({ kind: 'connecting' });
    this.registerTarget(kernel);
    void kernel.info.then(info => {
      if (this.kernel === kernel && info.language_info.name !== 'python') {
        this.closeComm();
        this.set({ kind: 'foreign', reason: 'language' });
      }
    });
    const comm = kernel.createComm(COMM_TARGET);
    this.attachComm(comm);
    comm.open();
  }

  /** Request the state. */
  refresh(): void {
    if (this.comm === null) {
      this.connect();
    } else {
      this.send({ kind: 'refresh' });
    }
  }

  /** Start or stop receiving the state each second. */
  watch(isOn: boolean): void {
    window.clearInterval(this.renewal);
    this.isWatching = isOn;
    const send = (): void => this.send({ kind: 'watch', on: isOn });
    send();
    if (isOn) {
      this.renewal = window.setInterval(send, RENEW_MS);
    }
  }

  /** Send a request, even while a cell runs; rejects with the text of the kernel's refusal. */
  request(topic: string, args: JSONObject): Promise<Readonly<Record<string, unknown>>> {
    if (this.current.kind !== 'ready') {
      return Promise.reject(new Error('not connected'));
    }
    const id = (this.lastId += 1);
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.send({ kind: 'request', id, topic, arguments: args });
    });
  }

  /** Run a line magic in the kernel, after the cells that are queued. */
  async run(code: string): Promise<RunResult> {
    const kernel = this.session.session?.kernel;
    if (!kernel) {
      return { ok: false, error: '' };
    }
    // A cell that fails aborts the queued requests. The magic does not depend on the cell, so it is sent again.
    for (let attempt = 1; ; attempt += 1) {
      let printed = '';
      const future = kernel.requestExecute({ code, store_history: false, stop_on_error: false });
      future.onIOPub = message => {
        if (KernelMessage.isStreamMsg(message) && message.content.name === 'stdout') {
          printed = (printed + message.content.text).slice(0, MAX_PRINTED);
        }
      };
      // Rejected if the kernel restarts or ends first.
      const content = await future.done.then(
        reply => reply.content,
        () => null
      );
      if (content === null) {
        return { ok: false, error: KERNEL_ENDED };
      }
      if (content.status === 'ok') {
        return { ok: true, printed };
      }
      if (content.status === 'error') {
        return { ok: false, error: capText(`${content.ename}: ${content.evalue}`, 1024) };
      }
      if (attempt === MAX_TRIES) {
        return { ok: false, error: '' };
      }
    }
  }

  /** Interrupt the running cell. */
  async interrupt(): Promise<void> {
    await this.session.session?.kernel?.interrupt();
  }

  get isDisposed(): boolean {
    return this.disposed;
  }

  dispose(): void {
    if (!this.disposed) {
      this.disposed = true;
      this.closeComm();
      window.clearInterval(this.renewal);
      this.kernel?.removeCommTarget(COMM_TARGET, this.onKernelComm);
      Signal.clearData(this);
    }
  }

  private registerTarget(kernel: Kernel.IKernelConnection): void {
    if (this.kernel !== kernel) {
      if (this.kernel !== null && !this.kernel.isDisposed) {
        this.kernel.removeCommTarget(COMM_TARGET, this.onKernelComm);
      }
      this.kernel = kernel;
      kernel.registerCommTarget(COMM_TARGET, this.onKernelComm);
    }
  }

  private readonly onKernelComm = (
    comm: Kernel.IComm,
    message: KernelMessage.ICommOpenMsg
  ): void => {
    this.closeComm();
    this.attachComm(comm);
    this.onMessage(comm, message);
  };

  private attachComm(comm: Kernel.IComm): void {
    this.comm = comm;
    comm.onMsg = message => this.onMessage(comm, message);
    comm.onClose = () => {
      if (this.comm === comm) {
        this.releaseComm();
        this.set({ kind: 'not-loaded' });
      }
    };
  }

  private onKernelChanged(): void {
    this.connect();
  }

  private onStatusChanged(_session: ISessionContext, status: Kernel.Status): void {
    if (status === 'restarting' || status === 'autorestarting') {
      this.releaseComm();
      this.set({ kind: 'connecting' });
      this.isRestarting = true;
    } else if (status === 'dead') {
      this.releaseComm();
      this.set({ kind: 'no-kernel' });
    } else if (status === 'idle' && this.isRestarting) {
      this.isRestarting = false;
      this.connect();
    }
  }

  private onMessage(
    comm: Kernel.IComm,
    message: KernelMessage.ICommMsgMsg | KernelMessage.ICommOpenMsg
  ): void {
    if (this.comm !== comm) {
      return;
    }
    const { data } = message.content;
    const info = parseSidebarState(data);
    if (info !== null) {
      const isNew = this.current.kind !== 'ready';
      this.set({ kind: 'ready', info });
      if (isNew) {
        this.connectedSignal.emit();
        if (this.isWatching) {
          this.watch(true);
        }
      }
      return;
    }
    const reply = parseReply(data);
    const request = reply && this.waiting.get(reply.id);
    if (!reply || !request) {
      console.warn('accel_nb: dropped a sidebar message that is unknown to this version');
      return;
    }
    this.waiting.delete(reply.id);
    if ('body' in reply) {
      request.resolve(reply.body);
    } else {
      request.reject(new Error(reply.refusal));
    }
  }

  private send(message: JSONObject): void {
    if (this.comm !== null && !this.comm.isDisposed) {
      void this.comm.send(message);
    }
  }

  private closeComm(): void {
    const comm = this.comm;
    this.releaseComm();
    if (comm !== null && !comm.isDisposed) {
      comm.dispose();
    }
  }

  private releaseComm(): void {
    this.comm = null;
    for (const { reject } of this.waiting.values()) {
      reject(new Error('the connection to the kernel was closed'));
    }
    this.waiting.clear();
  }

  private set(state: ChannelState): void {
    this.current = state;
    this.stateChangedSignal.emit(state);
  }

  private comm: Kernel.IComm | null = null;
  private kernel: Kernel.IKernelConnection | null = null;
  private current: ChannelState = { kind: 'no-kernel' };
  private isRestarting = false;
  private isWatching = false;
  private disposed = false;
  private renewal = 0;
  private lastId = 0;
  private readonly waiting = new Map<
    number,
    {
      readonly resolve: (body: Readonly<Record<string, unknown>>) => void;
      readonly reject: (error: Error) => void;
    }
  >();
  private readonly stateChangedSignal = new Signal<this, ChannelState>(this);
  private readonly connectedSignal = new Signal<this, void>(this);
}
