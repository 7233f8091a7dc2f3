/** Horizontal axes of curves: steps, or samples and time at each step, from the step tables. */

import { lowerBound, type ColumnTable } from './columns';
import { formatCount, formatSeconds } from './format';

export interface IAxis {
  readonly label: string;
  /** Whether places are seconds. */
  readonly isTime: boolean;
  /** The places of a table's rows, in the order of the rows; they do not decrease. */
  places(rank: number, table: ColumnTable): Float64Array;
  /** The place of a step that no table is asked for, such as a mark's. */
  placeOf(step: number): number;
}

export const STEP_AXIS: IAxis = {
  label: 'step',
  isTime: false,
  places: (_rank, table) => table.column(0),
  placeOf: step => step
};

/** A place as a person reads it: `step 1,200`, `1m 20s`. */
export function placeText(axis: IAxis, place: number): string {
  return axis.isTime
    ? formatSeconds(Number(place.toPrecision(3)))
    : `${axis.label} ${formatCount(place)}`;
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

  places(rank: number, table: ColumnTable): Float64Array {
    // A table of steps has the column itself; those of metrics are placed by the rank's steps.
    const guide =
      table.numColumns > this.column ? table : (this.steps.get(rank) ?? this.tableAt(-Infinity));
    if (guide === undefined) {
      return table.column(0);
    }
    const known = this.known.get(table) ?? new Places();
    this.known.set(table, known);
    const steps = table.column(0);
    const read = (row: number) =>
      guide === table ? this.at(guide, row) : this.lookUp(guide, steps[row]!);
    return known.upTo(
      steps.length,
      `${this.scale()} ${guide.generation} ${table.generation}`,
      read
    );
  }

  placeOf(step: number): number {
    const guide = this.tableAt(step);
    return guide === undefined ? step : this.lookUp(guide, step);
  }

  private lookUp(guide: ColumnTable, step: number): number {
    const row = lowerBound(guide.column(0), step);
    return this.at(guide, Math.min(row, guide.length - 1));
  }

  private at(guide: ColumnTable, row: number): number {
    const value = guide.column(this.column)[row] ?? 0;
    return Number.isFinite(value) ? value * this.scale() : 0;
  }

  /** The first table that reaches the step, else the last one. */
  private tableAt(step: number): ColumnTable | undefined {
    const filled = [...this.steps.values()].filter(table => table.length > 0);
    return (
      filled.find(table => table.column(0)[table.length - 1]! >= step) ?? filled[filled.length - 1]
    );
  }

  private readonly known = new WeakMap<ColumnTable, Places>();
}

/** The places of a growing table's rows: each row is looked up once, unless the tables were rewritten. */
class Places {
  upTo(numRows: number, stamp: string, read: (row: number) => number): Float64Array {
    if (stamp !== this.stamp) {
      this.stamp = stamp;
      this.numDone = 0;
    }
    if (this.places.length < numRows) {
      const grown = new Float64Array(Math.max(256, numRows, 2 * this.places.length));
      grown.set(this.places.subarray(0, this.numDone));
      this.places = grown;
    }
    for (; this.numDone < numRows; this.numDone++) {
      const before = this.numDone > 0 ? this.places[this.numDone - 1]! : -Infinity;
      this.places[this.numDone] = Math.max(before, read(this.numDone));
    }
    return this.places.subarray(0, numRows);
  }

  private places = new Float64Array(0);
  private numDone = 0;
  private stamp = '';
}
