/** The data of one panel. It is kept when views are removed, so a new view has the whole history. */

import { ColumnAxis, STEP_AXIS, type IAxis } from '../chart/axis';
import { ColumnTable, MAX_ROWS } from '../chart/columns';
import { MEAN_RANK, TABLE_COLUMNS, type IMark, type Query } from '../generated/messages';
import type { Answer, ICsv, IDetail } from './answers';
import { EarlierRuns, type AxisName } from './earlierRuns';
import type { IParsedMemorySnapshot } from './memorySnapshot';
import type { IBlock, IFacts, IPanelMessage } from './protocol';

/** Limit of tables of one panel; tables of further names or ranks are dropped. */
const MAX_TABLES = 2048;

/** The first key of the step tables of further losses, larger than every rank. */
const FURTHER_LOSSES_KEY = 1 << 20;

const LOSS_COLUMN = TABLE_COLUMNS.step.indexOf('loss');

/** The id of the learning rate's curve. */
export const LEARNING_RATE = 'step:learning rate';

/** One curve to choose from: a column of the step table, or a logged metric. */
export interface ICurve {
  readonly id: string;
  readonly table: 'step' | 'metric';
  /** The name of the metric, or of the loss in the step table. */
  readonly name: string;
  readonly label: string;
  readonly unit: 'ms' | '';
  /** Ranks in order; the mean, if there is one, is under `MEAN_RANK`. */
  readonly tables: ReadonlyMap<number, ColumnTable>;
  readonly column: number;
}

export class PanelModel {
  /** Step tables by loss name and rank. */
  private readonly stepsByName = new Map<string, Map<number, ColumnTable>>();
  /** The same tables by a number, for axes: the first loss's tables by rank, further ones by `FURTHER_LOSSES_KEY`. */
  private readonly steps = new Map<number, ColumnTable>();

  get facts(): IFacts | null {
    return this.currentFacts;
  }

  get marks(): readonly IMark[] {
    return this.currentMarks;
  }

  /** The latest memory snapshot of each rank; every change creates a new list. */
  get memorySnapshots(): readonly IParsedMemorySnapshot[] {
    return this.currentMemorySnapshots;
  }

  /** The sequence number of the last message applied. */
  get seq(): number {
    return this.currentSeq;
  }

  /** The number of rows of all ranks' step tables, without the mean. */
  get numPoints(): number {
    let sum = 0;
    for (const tables of this.stepsByName.values()) {
      for (const [rank, table] of tables) {
        sum += rank === MEAN_RANK ? 0 : table.length;
      }
    }
    return sum;
  }

  /** Memory tables by rank. */
  get memory(): ReadonlyMap<number, ColumnTable> {
    return this.memoryByRank;
  }

  /** A name of this page, which distinguishes it from other pages of the same panel. */
  readonly page = Math.random().toString(36).slice(2);

  /** The end of the cell's printed text; empty in the page that started the cell, which shows it as an output. */
  get text(): string {
    return this.hasStarted && !this.isReloaded ? '' : this.currentText;
  }

  /** Learning rates of future steps, by schedule. */
  get plans(): ColumnTable[] {
    return [...this.plansByName.values()].flatMap(tables => [...tables.values()]);
  }

  /** The curves that can be drawn, losses first. */
  curves(): ICurve[] {
    const losses = [...this.stepsByName];
    const isOne = losses.length === 1;
    const fromSteps = (['loss', 'learning rate', 'step time'] as const).flatMap(label =>
      losses.map(([name, tables], index): ICurve => {
        const lossName = name || 'loss';
        const ofLoss = isOne ? label : `${label} of ${lossName}`;
        return {
          id: `step:${label}${index === 0 ? '' : `:${name}`}`,
          table: 'step',
          name,
          label: label === 'loss' ? lossName : ofLoss,
          unit: label === 'step time' ? 'ms' : '',
          tables,
          column: TABLE_COLUMNS.step.indexOf(label)
        };
      })
    );
    const logged: ICurve[] = [...this.metrics].map(([name, tables]) => ({
      id: `metric:${name}`,
      table: 'metric',
      name,
      label: name,
      unit: '',
      tables,
      column: 1
    }));
    return [...fromSteps, ...logged];
  }

  /** The curves of the metrics that are validation losses of a loss; of another curve none. */
  validationCurves(curve: ICurve): ICurve[] {
    if (curve.table !== 'step' || curve.column !== LOSS_COLUMN) {
      return [];
    }
    return this.curves().filter(each => this.validatedLoss(each) === curve.name);
  }

  /** The name of the loss of which a curve is the validation loss; null if of none that can be drawn. */
  validatedLoss(curve: ICurve): string | null {
    const metric =
      curve.table === 'metric'
        ? this.currentFacts?.metrics.find(each => each.name === curve.name)
        : undefined;
    const loss = metric?.validates ?? null;
    return loss !== null && this.stepsByName.has(loss) ? loss : null;
  }

  /** Horizontal axes of curves. Samples are counted over all ranks, as the rank's own times the number of ranks. */
  readonly axes: Readonly<Record<AxisName, IAxis>> = {
    step: STEP_AXIS,
    samples: new ColumnAxis('samples', this.steps, TABLE_COLUMNS.step.indexOf('samples'), () =>
      Math.max(1, this.currentFacts?.numWorkers ?? 1)
    ),
    time: new ColumnAxis('seconds', this.steps, TABLE_COLUMNS.step.indexOf('time'), () => 1, true)
  };

  /**
   * Apply a message. Returns false for a delta that does not follow the last message, as after a reload of the page
   * during a run; the caller must then request a snapshot.
   */
  apply(message: IPanelMessage): boolean {
    if (message.kind === 'snapshot') {
      this.clear();
    } else if (message.base !== this.currentSeq) {
      return false;
    }
    for (const block of message.blocks) {
      this.tableFor(block)?.append(block.values, block.numRows);
    }
    this.currentSeq = message.seq;
    this.currentFacts = message.facts;
    this.currentMarks = message.marks ?? this.currentMarks;
    this.currentMemorySnapshots = message.memorySnapshots ?? this.currentMemorySnapshots;
    this.currentText = message.text ?? this.currentText;
    this.isReloaded ||= message.page === this.page;
    this.hasStarted ||= message.facts.status === 'running';
    this.notify();
    return true;
  }

  /** Apply an answer of the kernel. */
  applyAnswer(answer: Answer): void {
    switch (answer.kind) {
      case 'detail':
        this.refine(answer);
        break;
      case 'earlier':
        this.earlier.setRuns(answer.runs);
        break;
      case 'earlier curve':
        this.earlier.addCurve(answer);
        break;
      case 'csv':
        this.resolveCsv?.(answer);
        break;
      case 'share':
        this.sharedFile = answer.file ?? '';
        break;
    }
    this.notify();
  }

  /** The runs that this one can be compared with. */
  readonly earlier = new EarlierRuns(
    query => this.query(query),
    () => this.notify()
  );

  /** Query every row of a curve's steps from `first` to `last`. */
  queryDetail(curve: ICurve, first: number, last: number): void {
    this.query({ kind: 'detail', table: curve.table, name: curve.name, first, last });
  }

  /** The HTML file that the kernel wrote; empty if it could not write the file, null before its answer. */
  sharedFile: string | null = null;

  /** Query every row of the run; resolves to null if no kernel answers within `timeoutMs`. */
  queryCsv(timeoutMs: number): Promise<ICsv | null> {
    this.csv ??= new Promise<ICsv | null>(resolve => {
      const timer = setTimeout(() => resolve(null), timeoutMs);
      this.resolveCsv = answer => {
        clearTimeout(timer);
        resolve(answer);
      };
      this.query({ kind: 'csv' });
    }).finally(() => {
      this.csv = null;
      this.resolveCsv = null;
    });
    return this.csv;
  }

  /** Sends a query to the kernel. */
  query: (query: Query) => void = () => undefined;

  /** Call `listener` after each change, until `signal` aborts. */
  onChange(listener: () => void, signal: AbortSignal): void {
    this.listeners.add(listener);
    signal.addEventListener('abort', () => this.listeners.delete(listener));
  }

  /** Insert the rows of a range of a curve; for ranks without a table yet, later messages contain the rows. */
  private refine(detail: IDetail): void {
    for (const block of detail.blocks) {
      const table = this.tablesOf(block)?.get(block.rank);
      table?.refine(block.values, block.numRows, detail.first, detail.last);
    }
  }

  private notify(): void {
    for (const listener of this.listeners) {
      listener();
    }
  }

  private clear(): void {
    this.steps.clear();
    this.stepsByName.clear();
    this.metrics.clear();
    this.memoryByRank.clear();
    this.plansByName.clear();
    this.currentMarks = [];
    this.currentMemorySnapshots = [];
  }

  private tableFor(block: IBlock): ColumnTable | null {
    const existing = this.tablesOf(block)?.get(block.rank);
    if (existing !== undefined) {
      return existing;
    }
    if (this.numTables() >= MAX_TABLES) {
      return null;
    }
    const numColumns = TABLE_COLUMNS[block.table].length;
    const keyColumn = block.table === 'memory' ? numColumns - 1 : 1;
    const table = new ColumnTable(numColumns, keyColumn, MAX_ROWS);
    const tables = this.tablesOf(block) ?? new Map<number, ColumnTable>();
    tables.set(block.rank, table);
    if (block.table === 'step') {
      this.stepsByName.set(block.name, tables);
      const isFirst = this.stepsByName.keys().next().value === block.name;
      this.steps.set(isFirst ? block.rank : FURTHER_LOSSES_KEY + this.steps.size, table);
    } else if (block.table === 'metric') {
      this.metrics.set(block.name, tables);
    } else if (block.table === 'plan') {
      this.plansByName.set(block.name, tables);
    }
    return table;
  }

  private tablesOf(block: IBlock): Map<number, ColumnTable> | undefined {
    switch (block.table) {
      case 'step':
        return this.stepsByName.get(block.name);
      case 'memory':
        return this.memoryByRank;
      case 'metric':
        return this.metrics.get(block.name);
      case 'plan':
        return this.plansByName.get(block.name);
    }
  }

  private numTables(): number {
    let sum = this.steps.size + this.memoryByRank.size;
    for (const tables of [...this.metrics.values(), ...this.plansByName.values()]) {
      sum += tables.size;
    }
    return sum;
  }

  private readonly metrics = new Map<string, Map<number, ColumnTable>>();
  private readonly plansByName = new Map<string, Map<number, ColumnTable>>();
  private readonly memoryByRank = new Map<number, ColumnTable>();
  private readonly listeners = new Set<() => void>();
  private currentFacts: IFacts | null = null;
  private currentMarks: readonly IMark[] = [];
  private currentMemorySnapshots: readonly IParsedMemorySnapshot[] = [];
  private currentSeq = 0;
  private currentText = '';
  private isReloaded = false;
  /** Whether the page has received messages of the running cell. */
  private hasStarted = false;
  /** The answer to the query for every row that is under way; null if none is. */
  private csv: Promise<ICsv | null> | null = null;
  private resolveCsv: ((answer: ICsv) => void) | null = null;
}
