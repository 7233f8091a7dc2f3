/** Tables of numbers, stored by column in typed arrays, which grow by doubling up to a limit. */

/** In a table with more rows the older ones are thinned to about half. */
export const MAX_ROWS = 1 << 20;

/** The number of newest rows that are not thinned. */
const KEPT_RAW = 1 << 12;

/** The number of successive rows of which thinning keeps the lowest and the highest. */
const THINNED_BLOCK = 4;

export class ColumnTable {
  /**
   * The first column is x and must not decrease; thinning keeps the minima and maxima of `keyColumn`.
   */
  constructor(
    readonly numColumns: number,
    readonly keyColumn: number,
    private readonly maxRows: number = MAX_ROWS
  ) {
    this.columns = Array.from({ length: numColumns }, () => new Float64Array(256));
  }

  get length(): number {
    return this.rows;
  }

  /** A number that increases whenever the indices of existing rows have changed. */
  get generation(): number {
    return this.numRewrites;
  }

  /** A view of the column's values; the next append may move the data to another array. */
  column(index: number): Float64Array {
    const column = this.columns[index];
    if (column === undefined) {
      throw new RangeError(`no column ${index} in a table of ${this.numColumns}`);
    }
    return column.subarray(0, this.rows);
  }

  /** Append rows from one array, in which each column is stored after the other. */
  append(block: Float64Array, numRows: number): void {
    if (block.length !== numRows * this.numColumns) {
      throw new RangeError(`${block.length} values are not ${numRows} rows of ${this.numColumns}`);
    }
    this.reserve(this.rows + numRows);
    this.columns.forEach((column, index) => {
      column.set(block.subarray(index * numRows, (index + 1) * numRows), this.rows);
    });
    this.rows += numRows;
    if (this.rows > this.maxRows) {
      this.thin();
    }
  }

  /**
   * Replace the rows with x in `[first, last]` by rows from one array, in which each column is stored after the other.
   * Rows after the newest one of this table are left out, since later messages contain them.
   */
  refine(block: Float64Array, numRows: number, first: number, last: number): void {
    if (block.length !== numRows * this.numColumns) {
      throw new RangeError(`${block.length} values are not ${numRows} rows of ${this.numColumns}`);
    }
    const xs = this.column(0);
    const from = lowerBound(xs, first);
    const to = Math.max(from, upperBound(xs, last));
    const newest = xs[this.rows - 1] ?? -Infinity;
    const added = upperBound(block.subarray(0, numRows), newest);
    const total = from + added + (this.rows - to);
    if (added <= to - from || total > this.maxRows) {
      return;
    }
    this.columns = this.columns.map((column, index) => {
      const refined = new Float64Array(Math.max(256, 2 * total));
      refined.set(column.subarray(0, from));
      refined.set(block.subarray(index * numRows, index * numRows + added), from);
      refined.set(column.subarray(to, this.rows), from + added);
      return refined;
    });
    this.rows = total;
    this.numRewrites += 1;
  }

  clear(): void {
    this.rows = 0;
    this.numRewrites += 1;
  }

  private reserve(numRows: number): void {
    const capacity = this.columns[0]?.length ?? 0;
    if (numRows <= capacity) {
      return;
    }
    const grown = Math.max(numRows, capacity * 2);
    this.columns = this.columns.map(column => {
      const larger = new Float64Array(grown);
      larger.set(column.subarray(0, this.rows));
      return larger;
    });
  }

  private thin(): void {
    const key = this.column(this.keyColumn);
    const end = Math.max(0, this.rows - KEPT_RAW);
    let kept = 0;
    const keep = (row: number) => {
      for (const column of this.columns) {
        column[kept] = column[row]!;
      }
      kept += 1;
    };
    for (let start = 0; start < end; start += THINNED_BLOCK) {
      const [first, second] = extremes(key, start, Math.min(start + THINNED_BLOCK, end));
      keep(first);
      if (second !== first) {
        keep(second);
      }
    }
    for (let row = end; row < this.rows; row++) {
      keep(row);
    }
    this.rows = kept;
    this.numRewrites += 1;
  }

  private columns: Float64Array[];
  private rows = 0;
  private numRewrites = 0;
}

/** The first row whose x is at least `x`; `xs` must not decrease. */
export function lowerBound(xs: ArrayLike<number>, x: number): number {
  let low = 0;
  let high = xs.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle]! < x) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/** The first row whose x is greater than `x`; `xs` must not decrease. */
function upperBound(xs: Float64Array, x: number): number {
  let row = lowerBound(xs, x);
  while (row < xs.length && xs[row] === x) {
    row += 1;
  }
  return row;
}

/**
 * The rows of the lowest and the highest finite value in `[start, end)`, in row order; a range without finite values
 * returns its first row twice.
 */
export function extremes(values: Float64Array, start: number, end: number): [number, number] {
  let low = -1;
  let high = -1;
  for (let row = start; row < end; row++) {
    const value = values[row]!;
    if (!Number.isFinite(value)) {
      continue;
    }
    if (low < 0 || value < values[low]!) {
      low = row;
    }
    if (high < 0 || value > values[high]!) {
      high = row;
    }
  }
  if (low < 0) {
    return [start, start];
  }
  return low < high ? [low, high] : [high, low];
}
