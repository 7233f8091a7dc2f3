/**
 * Selection of the rows of a long column to draw: the lowest and the highest of each block of rows.
 *
 * The number of rows in a block is a power of two, and blocks start at row 0, so that a complete block is always drawn
 * in the same way. Block boundaries that depend on the chart's width would make a growing curve flicker.
 */

import { ColumnTable, extremes } from './columns';

/** The smallest power of two that divides `numRows` into at most `maxBlocks` blocks. */
export function blockSize(numRows: number, maxBlocks: number): number {
  let size = 1;
  while (Math.ceil(numRows / size) > Math.max(1, maxBlocks)) {
    size *= 2;
  }
  return size;
}

/** The rows to draw out of `[from, to)`, with blocks aligned to row 0. */
export function pickRows(
  values: Float64Array,
  from: number,
  to: number,
  maxBlocks: number
): number[] {
  const size = blockSize(to - from, maxBlocks);
  const rows: number[] = [];
  for (let start = from - (from % size); start < to; start += size) {
    pushBlock(rows, values, Math.max(start, from), Math.min(start + size, to));
  }
  return rows;
}

/** The range of a column's values in each block of rows, at the middle of the block's drawn rows. */
export interface IBand {
  readonly xs: readonly number[];
  readonly lows: readonly number[];
  readonly highs: readonly number[];
}

/** The band of rows that were picked from blocks of `size`; blocks without a drawable value are left out. */
export function bandOf(
  rows: readonly number[],
  size: number,
  xs: ArrayLike<number>,
  drawable: (row: number) => number | null
): IBand {
  const band = { xs: [] as number[], lows: [] as number[], highs: [] as number[] };
  for (let first = 0, next = 0; first < rows.length; first = next) {
    const block = Math.floor(rows[first]! / size);
    let low = Infinity;
    let high = -Infinity;
    for (; next < rows.length && Math.floor(rows[next]! / size) === block; next++) {
      const value = drawable(rows[next]!);
      if (value !== null) {
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (low <= high) {
      band.xs.push((xs[rows[first]!]! + xs[rows[next - 1]!]!) / 2);
      band.lows.push(low);
      band.highs.push(high);
    }
  }
  return band;
}

/** Selects the rows to draw of a growing column; only new blocks are examined. */
export class RowPicker {
  constructor(
    private readonly table: ColumnTable,
    private readonly keyColumn: number
  ) {}

  pick(maxBlocks: number): number[] {
    const { table } = this;
    const size = blockSize(table.length, maxBlocks);
    if (size !== this.size || table.generation !== this.generation) {
      this.size = size;
      this.generation = table.generation;
      this.rows = [];
      this.numSeen = 0;
    }
    const values = table.column(this.keyColumn);
    while (this.numSeen + size <= table.length) {
      pushBlock(this.rows, values, this.numSeen, this.numSeen + size);
      this.numSeen += size;
    }
    const rows = this.rows.slice();
    if (this.numSeen < table.length) {
      pushBlock(rows, values, this.numSeen, table.length);
    }
    return rows;
  }

  private rows: number[] = [];
  private size = 0;
  private generation = -1;
  private numSeen = 0;
}

function pushBlock(rows: number[], values: Float64Array, start: number, end: number): void {
  const [first, second] = extremes(values, start, end);
  rows.push(first);
  if (second !== first) {
    rows.push(second);
  }
}
