/** The sidebar's state for one open notebook: its kernel, the line of its active cell, and its options. */

import type { Notebook, NotebookPanel } from '@jupyterlab/notebook';
import { NotebookActions } from '@jupyterlab/notebook';
import { Signal, type ISignal } from '@lumino/signaling';
import { SidebarChannel, type RunResult } from '../channel';
import { editLine, findLine, magicLine, type CellLine } from '../model/cellLine';
import { readValues, withValue } from '../model/flags';
import { readForecast, type IForecast } from '../model/forecast';
import { LogLines } from '../model/logLines';
import { METADATA_KEY, readSettings, writeSettings } from '../model/settings';
import { parseLogPart, parseResolution, type IResolution } from '../model/sidebarState';
import { RecentRuns } from './recentRuns';

const RESOLVE_MS = 150;
const FORECAST_MS = 700;

/** The options that the form edits: those in the active cell's line, or the notebook's for all cells. */
export type Scope = 'cell' | 'notebook';

export type Forecast =
  | { readonly kind: 'none' }
  | { readonly kind: 'running'; readonly last: IForecast | null }
  | { readonly kind: 'done'; readonly forecast: IForecast }
  | { readonly kind: 'no-model' }
  | { readonly kind: 'failed'; readonly error: string };

export class NotebookSession {
  constructor(
    readonly panel: NotebookPanel,
    private readonly followsForecast: () => boolean
  ) {
    this.channel = new SidebarChannel(panel.sessionContext);
    this.recent = new RecentRuns(this.channel, () => this.onRunsChanged());
    this.channel.stateChanged.connect(this.onState, this);
    this.channel.connected.connect(this.onConnected, this);
    panel.content.activeCellChanged.connect(this.onActiveCell, this);
    panel.content.modelChanged.connect(this.onModel, this);
    this.onModel(panel.content);
  }

  readonly channel: SidebarChannel;
  readonly recent: RecentRuns;
  readonly log = new LogLines();

  get changed(): ISignal<this, void> {
    return this.changedSignal;
  }

  get scope(): Scope {
    return this.currentScope;
  }

  set scope(scope: Scope) {
    this.currentScope = scope;
    this.onEdited();
  }

  /** The line of the active cell; null if no code cell is active. */
  get line(): CellLine | null {
    const cell = this.panel.content.activeCell;
    return cell?.model.type === 'code' ? findLine(cell.model.sharedModel.getSource()) : null;
  }

  /** The flags that the form shows: those of the active cell's line, or those chosen for a new line. */
  get flags(): string {
    const line = this.line;
    return line?.kind === 'line' ? line.flags : this.draft;
  }

  /** The values of the form by option; null if the line cannot be parsed. */
  get values(): ReadonlyMap<string, string> | null {
    return this.scope === 'notebook'
      ? new Map(Object.entries(this.settings))
      : readValues(this.flags);
  }

  /** The options in the notebook's metadata. */
  get settings(): Readonly<Record<string, string>> {
    return readSettings(this.panel.content.model?.getMetadata(METADATA_KEY));
  }

  get resolution(): IResolution | null {
    return this.currentResolution;
  }

  get forecast(): Forecast {
    return this.currentForecast;
  }

  /** The error of the last action; empty if it succeeded. */
  get error(): string {
    return this.lastError;
  }

  /** The rank whose log is shown; null if none is. */
  get logRank(): number | null {
    return this.shownRank;
  }

  /** Set an option; the value undefined removes it. */
  choose(name: string, value: string | undefined): void {
    if (this.scope === 'notebook') {
      const settings: Record<string, string> = { ...this.settings };
      if (value === undefined) {
        delete settings[name];
      } else {
        settings[name] = value;
      }
      this.writeSettings(settings);
      return;
    }
    const flags = withValue(this.flags, name, value);
    if (flags === null) {
      return;
    }
    if (this.line?.kind === 'line') {
      this.editActiveCell(flags);
    } else {
      this.draft = flags;
      this.onEdited();
    }
  }

  /** Insert the line at the start of the active cell, or into a new cell below if the active one has another magic. */
  insert(): void {
    this.useFlags(this.flags);
  }

  /** Set the flags of the active cell's line; if it has none, insert the line as `insert` does. */
  useFlags(flags: string): void {
    const line = this.line;
    if (line === null || line.kind === 'other') {
      this.insertCell(flags);
    } else {
      this.editActiveCell(flags);
    }
    this.draft = '';
  }

  /** Load the extension into the kernel. */
  async load(): Promise<void> {
    await this.runMagic('%load_ext accel_nb');
  }

  async start(): Promise<void> {
    await this.runMagic(`%accelerate start ${this.flags}`.trimEnd());
  }

  async restart(): Promise<void> {
    await this.interruptCell();
    await this.runMagic('%accelerate restart');
  }

  async stop(): Promise<void> {
    await this.interruptCell();
    await this.runMagic('%accelerate stop');
  }

  async interrupt(): Promise<void> {
    await this.channel.interrupt();
  }

  /** Request a forecast for the line's options; later changes in the form request it again. */
  async requestForecast(): Promise<void> {
    window.clearTimeout(this.forecastTimer);
    const last = this.currentForecast.kind === 'done' ? this.currentForecast.forecast : null;
    const { flags, forecastKey } = this;
    this.setForecast({ kind: 'running', last }, forecastKey);
    const result = await this.channel.run(`%accelerate plan --json ${flags}`.trimEnd());
    if (this.isDisposed) {
      return;
    }
    if (!result.ok) {
      this.setForecast({ kind: 'failed', error: result.error }, forecastKey);
      return;
    }
    const forecast = readForecast(result.printed);
    this.setForecast(
      forecast === null ? { kind: 'no-model' } : { kind: 'done', forecast },
      forecastKey
    );
    this.scheduleForecast();
  }

  showLog(rank: number | null): void {
    this.shownRank = rank;
    this.log.clear();
    this.logName = '';
    this.logEnd = 0;
    void this.readLog();
    this.changedSignal.emit();
  }

  get isDisposed(): boolean {
    return this.channel.isDisposed;
  }

  dispose(): void {
    window.clearTimeout(this.resolveTimer);
    window.clearTimeout(this.forecastTimer);
    this.channel.dispose();
    Signal.clearData(this);
  }

  private async runMagic(code: string): Promise<void> {
    const result: RunResult = await this.channel.run(code);
    if (!this.isDisposed) {
      this.lastError = result.ok ? '' : result.error;
      this.channel.refresh();
      this.changedSignal.emit();
    }
  }

  /** Interrupt a cell that runs on the workers, since the magic would wait for its end. */
  private async interruptCell(): Promise<void> {
    const state = this.channel.state;
    if (state.kind === 'ready' && state.info.pool === 'busy') {
      await this.channel.interrupt();
    }
  }

  private editActiveCell(flags: string): void {
    const shared = this.panel.content.activeCell?.model.sharedModel;
    const edit = shared && editLine(shared.getSource(), flags);
    if (edit) {
      shared.updateSource(edit.start, edit.end, edit.text);
    }
  }

  private insertCell(flags: string): void {
    NotebookActions.insertBelow(this.panel.content);
    this.panel.content.activeCell?.model.sharedModel.setSource(`${magicLine(flags)}\n`);
  }

  private writeSettings(settings: Readonly<Record<string, string>>): void {
    const model = this.panel.content.model;
    const metadata = writeSettings(model?.getMetadata(METADATA_KEY), settings);
    if (metadata === undefined) {
      model?.deleteMetadata(METADATA_KEY);
    } else {
      model?.setMetadata(METADATA_KEY, metadata);
    }
  }

  private onModel(notebook: Notebook): void {
    notebook.model?.metadataChanged.connect(this.onMetadata, this);
    this.onActiveCell(notebook);
  }

  private onActiveCell(notebook: Notebook): void {
    const shared = notebook.activeCell?.model.sharedModel ?? null;
    if (shared !== this.observedSource) {
      this.observedSource?.changed.disconnect(this.onEdited, this);
      shared?.changed.connect(this.onEdited, this);
      this.observedSource = shared;
    }
    this.onEdited();
  }

  private onMetadata(_model: unknown, change: { readonly key: string }): void {
    if (change.key === METADATA_KEY) {
      void this.sendSettings();
      this.onEdited();
    }
  }

  private onRunsChanged(): void {
    if (!this.isDisposed) {
      this.changedSignal.emit();
    }
  }

  private onConnected(): void {
    void this.sendSettings();
    void this.resolve();
  }

  private onState(): void {
    const state = this.channel.state;
    if (state.kind === 'ready') {
      void this.readLog();
      void this.recent.follow(state.info.runs);
    } else {
      this.currentResolution = null;
    }
    this.changedSignal.emit();
  }

  /** Called on each edit, change of the active cell and of settings; returns early if the form's inputs are the same. */
  private onEdited(): void {
    const { line, settings } = this;
    const inputs = JSON.stringify([this.scope, line?.kind, this.flags, settings]);
    if (inputs === this.lastInputs) {
      return;
    }
    this.lastInputs = inputs;
    window.clearTimeout(this.resolveTimer);
    this.resolveTimer = window.setTimeout(() => void this.resolve(), RESOLVE_MS);
    if (this.currentForecast.kind === 'done') {
      this.scheduleForecast();
    }
    this.changedSignal.emit();
  }

  private scheduleForecast(): void {
    window.clearTimeout(this.forecastTimer);
    if (this.followsForecast() && this.forecastKey !== this.lastForecastKey) {
      this.forecastTimer = window.setTimeout(() => void this.requestForecast(), FORECAST_MS);
    }
  }

  private async sendSettings(): Promise<void> {
    await this.channel
      .request('notebook', { settings: { ...this.settings } })
      .catch(() => undefined);
  }

  private async resolve(): Promise<void> {
    const flags = this.scope === 'notebook' ? '' : this.flags;
    const number = (this.resolveNumber += 1);
    try {
      const given = { line: flags, settings: { ...this.settings } };
      const resolution = parseResolution(await this.channel.request('options', given));
      if (number !== this.resolveNumber) {
        return; // a later request has been sent
      }
      // While there are problems, the last valid values and origins stay visible.
      const options =
        resolution.options.size > 0 ? resolution.options : this.currentResolution?.options;
      this.currentResolution = { ...resolution, options: options ?? new Map() };
      this.changedSignal.emit();
    } catch {
      // The kernel has ended, or its version has no such request, which the channel's state reports.
    }
  }

  private async readLog(): Promise<void> {
    const state = this.channel.state;
    const head =
      state.kind === 'ready' ? state.info.logs.find(log => log.rank === this.shownRank) : undefined;
    const isNew = head !== undefined && (head.log !== this.logName || head.numBytes > this.logEnd);
    if (!isNew || this.isReadingLog) {
      return;
    }
    this.isReadingLog = true;
    try {
      const given = { rank: head.rank, log: this.logName, seen: this.logEnd };
      const part = parseLogPart(await this.channel.request('log', given));
      if (part.rank === this.shownRank) {
        if (part.start === 0) {
          this.log.clear();
        }
        this.log.append(part.text);
        this.logName = part.log;
        this.logEnd = part.end;
        this.changedSignal.emit();
      }
    } catch {
      // Read again with the next state.
    } finally {
      this.isReadingLog = false;
    }
  }

  /** The inputs of a forecast, as a key. */
  private get forecastKey(): string {
    return JSON.stringify([this.flags, this.settings]);
  }

  private setForecast(forecast: Forecast, key: string): void {
    this.currentForecast = forecast;
    this.lastForecastKey = key;
    this.changedSignal.emit();
  }

  private draft = '';
  private lastInputs = '';
  private resolveNumber = 0;
  private currentScope: Scope = 'cell';
  private currentResolution: IResolution | null = null;
  private currentForecast: Forecast = { kind: 'none' };
  private lastForecastKey = '';
  private lastError = '';
  private shownRank: number | null = null;
  private logName = '';
  private logEnd = 0;
  private isReadingLog = false;
  private resolveTimer = 0;
  private forecastTimer = 0;
  private observedSource: NonNullable<Notebook['activeCell']>['model']['sharedModel'] | null = null;
  private readonly changedSignal = new Signal<this, void>(this);
}
