/** Horizontal axes of curves: steps, or the samples or time at each step, which are read from the step tables. */

import { lowerBound, type ColumnTable } from './columns';
import { formatCount, formatSeconds } from './format';

export interface IAxis {
  readonly label: string;
  /** Whether positions are seconds. */
  readonly isTime: boolean;
  /** The positions of a table's rows, in the order of the rows; they do not decrease. */
  positions(rank: number, table: ColumnTable): Float64Array;
  /** The position of a step without a table, such as that of a mark. */
  positionOf(step: number): number;
}

export const STEP_AXIS: IAxis = {
  label: 'step',
  isTime: false,
  positions: (_rank, table) => table.column(0),
  positionOf: step => step
};

/** The text of a position: `step 1,200`, `1m 20s`. */
export function positionText(axis: IAxis, position: number): string {
  return axis.isTime
    ? formatSeconds(Number(position.toPrecision(3)))
    : `${axis.label} ${formatCount(position)}`;
}

/** An axis that reads a column of the step tables; `scale` multiplies it. */
export class ColumnAxis implements IAxis {
  constructor(
    readonly label: string,
    private readonly steps: ReadonlyMap<number, ColumnTable>,
    private readonly column: number,
    private readonly scale: () => number,
    readonly isTime: boolean = false
  ) {}

  positions(rank: number, table: ColumnTable): Float64Array {
    // A step table has the column; for a metric's table, positions are looked up in the rank's step table.
    const source =
      table.numColumns > this.column ? table : (this.steps.get(rank) ?? this.tableAt(-Infinity));
    if (source === undefined) {
      return table.column(0);
    }
    const cached = this.cache.get(table) ?? new Positions();
    this.cache.set(table, cached);
    const steps = table.column(0);
    const read = (row: number) =>
      source === table ? this.at(source, row) : this.lookUp(source, steps[row]!);
    return cached.upTo(
      steps.length,
      `${this.scale()} ${source.generation} ${table.generation}`,
      read
    );
  }

  positionOf(step: number): number {
    const source = this.tableAt(step);
    return source === undefined ? step : this.lookUp(source, step);
  }

  private lookUp(source: ColumnTable, step: number): number {
    const row = lowerBound(source.column(0), step);
    return this.at(source, Math.min(row, source.length - 1));
  }

  private at(source: ColumnTable, row: number): number {
    const value = source.column(this.column)[row] ?? 0;
    return Number.isFinite(value) ? value * this.scale() : 0;
  }

  /** The first step table that contains the step or later ones, else the last table. */
  private tableAt(step: number): ColumnTable | undefined {
    const filled = [...this.steps.values()].filter(table => table.length > 0);
    return (
      filled.find(table => table.column(0)[table.length - 1]! >= step) ?? filled[filled.length - 1]
    );
  }

  private readonly cache = new WeakMap<ColumnTable, Positions>();
}

/** Cached positions of a growing table's rows: each row is computed once, unless `stamp` changes. */
class Positions {
  upTo(numRows: number, stamp: string, read: (row: number) => number): Float64Array {
    if (stamp !== this.stamp) {
      this.stamp = stamp;
      this.numDone = 0;
    }
    if (this.positions.length < numRows) {
      const grown = new Float64Array(Math.max(256, numRows, 2 * this.positions.length));
      grown.set(this.positions.subarray(0, this.numDone));
      this.positions = grown;
    }
    for (; this.numDone < numRows; this.numDone++) {
      const before = this.numDone > 0 ? this.positions[this.numDone - 1]! : -Infinity;
      this.positions[this.numDone] = Math.max(before, read(this.numDone));
    }
    return this.positions.subarray(0, numRows);
  }

  private positions = new Float64Array(0);
  private numDone = 0;
  private stamp = '';
}
