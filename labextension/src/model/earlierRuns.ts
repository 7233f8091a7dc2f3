/** Earlier runs of the notebook: the list, the chosen runs, and the curves that have been received. */

import { ColumnAxis, STEP_AXIS, type IAxis } from '../chart/axis';
import { ColumnTable } from '../chart/columns';
import { TABLE_COLUMNS, type Query } from '../generated/messages';
import type { IEarlierCurve, IEarlierRun } from './answers';

export type AxisName = 'step' | 'samples' | 'time';

/** The name of a curve, which is the same in all runs. */
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
      this.curves.get(run)?.requested.clear(); // curves that did not arrive are queried again
    } else {
      this.chosen.delete(run);
    }
    this.changed();
  }

  /** Set the list; chosen runs that the kernel no longer has are kept. */
  setRuns(runs: readonly IEarlierRun[]): void {
    const removed = (this.listed ?? []).filter(
      known => this.chosen.has(known.run) && !runs.some(run => run.run === known.run)
    );
    this.listed = [...runs, ...removed];
  }

  /** Add a curve that was queried; other curves are dropped. */
  addCurve(answer: IEarlierCurve): void {
    const curves = this.curves.get(answer.run);
    for (const block of answer.blocks) {
      const key = keyOf({ table: block.table === 'metric' ? 'metric' : 'step', name: block.name });
      if (curves === undefined || !curves.requested.has(key) || curves.tables.has(key)) {
        continue;
      }
      const table = new ColumnTable(TABLE_COLUMNS[block.table].length, 1);
      table.append(block.values, block.numRows);
      curves.tables.set(key, table);
      curves.numWorkers = Math.max(1, answer.numWorkers);
      if (block.table === 'step') {
        curves.steps.set(0, table);
      }
    }
  }

  /** The lines of earlier runs to draw with a curve; missing ones are queried. */
  lines(curve: ICurveName, axis: AxisName): IEarlierLine[] {
    return (this.listed ?? [])
      .filter(({ run }) => this.chosen.has(run))
      .flatMap(({ run, title }) => {
        const curves = this.curves.get(run) ?? this.addRun(run);
        this.requestMissing(run, curves, { table: 'step', name: '' });
        this.requestMissing(run, curves, curve);
        const table = curves.tables.get(keyOf(curve));
        const hasPositions = axis === 'step' || curves.steps.size > 0;
        return table && hasPositions ? [{ run, title, table, axis: curves.axes[axis] }] : [];
      });
  }

  private addRun(run: number): ICurvesOfRun {
    const steps = new Map<number, ColumnTable>();
    const column = (name: 'samples' | 'time') => TABLE_COLUMNS.step.indexOf(name);
    const curves: ICurvesOfRun = {
      requested: new Set(),
      tables: new Map(),
      steps,
      numWorkers: 1,
      axes: {
        step: STEP_AXIS,
        samples: new ColumnAxis('samples', steps, column('samples'), () => curves.numWorkers),
        time: new ColumnAxis('seconds', steps, column('time'), () => 1, true)
      }
    };
    this.curves.set(run, curves);
    return curves;
  }

  private requestMissing(run: number, curves: ICurvesOfRun, curve: ICurveName): void {
    const key = keyOf(curve);
    if (!curves.requested.has(key) && !curves.tables.has(key)) {
      curves.requested.add(key);
      this.query({ kind: 'earlier', run, table: curve.table, name: curve.name });
    }
  }

  private listed: readonly IEarlierRun[] | null = null;
  private readonly chosen = new Set<number>();
  private readonly curves = new Map<number, ICurvesOfRun>();
}

/** The received curves of one earlier run, and the keys of those that were queried. */
interface ICurvesOfRun {
  readonly requested: Set<string>;
  readonly tables: Map<string, ColumnTable>;
  /** The run's step table, from which its other axes are read. */
  readonly steps: Map<number, ColumnTable>;
  readonly axes: Readonly<Record<AxisName, IAxis>>;
  numWorkers: number;
}

function keyOf({ table, name }: ICurveName): string {
  return `${table}:${name}`;
}
