/** A column's moving average, extended as the column grows: each value is read once. */

import type { ColumnTable } from './columns';

export class SmoothedColumn {
  /** `weight` is the weight of earlier values, from 0 to below 1. */
  constructor(
    private readonly table: ColumnTable,
    private readonly column: number,
    private readonly weight: number
  ) {}

  /**
   * The exponential moving average up to each row, without the bias towards zero at the start (Kingma and Ba, 2015,
   * section 3). Values that are not finite are left out of the average and returned unchanged.
   */
  values(): Float64Array {
    const raw = this.table.column(this.column);
    if (this.table.generation !== this.generation) {
      this.generation = this.table.generation;
      this.numDone = 0;
      this.sum = 0;
      this.share = 0;
    }
    if (this.smoothed.length < raw.length) {
      const grown = new Float64Array(Math.max(256, raw.length, 2 * this.smoothed.length));
      grown.set(this.smoothed.subarray(0, this.numDone));
      this.smoothed = grown;
    }
    for (; this.numDone < raw.length; this.numDone++) {
      const value = raw[this.numDone]!;
      if (Number.isFinite(value)) {
        this.sum = this.weight * this.sum + (1 - this.weight) * value;
        this.share = this.weight * this.share + (1 - this.weight);
      }
      this.smoothed[this.numDone] = Number.isFinite(value) ? this.sum / this.share : value;
    }
    return this.smoothed.subarray(0, raw.length);
  }

  private smoothed = new Float64Array(0);
  private generation = -1;
  private numDone = 0;
  private sum = 0;
  private share = 0;
}
