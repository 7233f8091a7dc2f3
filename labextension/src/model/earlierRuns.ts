/** Earlier runs of the notebook: the list, the chosen ones, and the curves received so far. */

import { ColumnAxis, STEP_AXIS, type IAxis } from '../chart/axis';
import { ColumnTable } from '../chart/columns';
import { TABLE_COLUMNS, type Query } from '../generated/messages';
import type { IEarlierCurve, IEarlierRun } from './answers';

export type AxisName = 'step' | 'samples' | 'time';

/** A curve of this panel by the name that an earlier run's has. */
interface ICurveName {
  readonly table: 'step' | 'metric';
  readonly name: string;
}

/** A curve of an earlier run. */
export interface IEarlierLine {
  readonly run: number;
  readonly title: string;
  readonly table: ColumnTable;
  readonly axis: IAxis;
}

export class EarlierRuns {
  constructor(
    private readonly query: (query: Query) => void,
    private readonly changed: () => void
  ) {}

  /** The runs to choose from; null before the kernel has answered. */
  get runs(): readonly IEarlierRun[] | null {
    return this.listed;
  }

  isChosen(run: number): boolean {
    return this.chosen.has(run);
  }

  /** Query the list of runs. */
  list(): void {
    this.query({ kind: 'earlier' });
  }

  choose(run: number, isChosen: boolean): void {
    if (isChosen) {
      this.chosen.add(run);
      this.drawn.get(run)?.asked.clear(); // curves that did not arrive are queried again
    } else {
      this.chosen.delete(run);
    }
    this.changed();
  }

  /** Set the list; a chosen run that the kernel no longer keeps stays. */
  setRuns(runs: readonly IEarlierRun[]): void {
    const gone = (this.listed ?? []).filter(
      known => this.chosen.has(known.run) && !runs.some(run => run.run === known.run)
    );
    this.listed = [...runs, ...gone];
  }

  /** Add a curve that was queried; others are dropped. */
  addCurve(answer: IEarlierCurve): void {
    const drawn = this.drawn.get(answer.run);
    for (const block of answer.blocks) {
      const key = keyOf({ table: block.table === 'metric' ? 'metric' : 'step', name: block.name });
      if (drawn === undefined || !drawn.asked.has(key) || drawn.tables.has(key)) {
        continue;
      }
      const table = new ColumnTable(TABLE_COLUMNS[block.table].length, 1);
      table.append(block.values, block.numRows);
      drawn.tables.set(key, table);
      drawn.numWorkers = Math.max(1, answer.numWorkers);
      if (block.table === 'step') {
        drawn.steps.set(0, table);
      }
    }
  }

  /** The lines to draw beside a curve; missing ones are queried. */
  lines(curve: ICurveName, axis: AxisName): IEarlierLine[] {
    return (this.listed ?? [])
      .filter(({ run }) => this.chosen.has(run))
      .flatMap(({ run, title }) => {
        const drawn = this.drawn.get(run) ?? this.begin(run);
        this.requestMissing(run, drawn, { table: 'step', name: '' });
        this.requestMissing(run, drawn, curve);
        const table = drawn.tables.get(keyOf(curve));
        const hasPlaces = axis === 'step' || drawn.steps.size > 0;
        return table && hasPlaces ? [{ run, title, table, axis: drawn.axes[axis] }] : [];
      });
  }

  private begin(run: number): IDrawn {
    const steps = new Map<number, ColumnTable>();
    const column = (name: 'samples' | 'time') => TABLE_COLUMNS.step.indexOf(name);
    const drawn: IDrawn = {
      asked: new Set(),
      tables: new Map(),
      steps,
      numWorkers: 1,
      axes: {
        step: STEP_AXIS,
        samples: new ColumnAxis('samples', steps, column('samples'), () => drawn.numWorkers),
        time: new ColumnAxis('seconds', steps, column('time'), () => 1, true)
      }
    };
    this.drawn.set(run, drawn);
    return drawn;
  }

  private requestMissing(run: number, drawn: IDrawn, curve: ICurveName): void {
    const key = keyOf(curve);
    if (!drawn.asked.has(key) && !drawn.tables.has(key)) {
      drawn.asked.add(key);
      this.query({ kind: 'earlier', run, table: curve.table, name: curve.name });
    }
  }

  private listed: readonly IEarlierRun[] | null = null;
  private readonly chosen = new Set<number>();
  private readonly drawn = new Map<number, IDrawn>();
}

interface IDrawn {
  readonly asked: Set<string>;
  readonly tables: Map<string, ColumnTable>;
  /** The run's steps, from which its other axes are read. */
  readonly steps: Map<number, ColumnTable>;
  readonly axes: Readonly<Record<AxisName, IAxis>>;
  numWorkers: number;
}

function keyOf({ table, name }: ICurveName): string {
  return `${table}:${name}`;
}
