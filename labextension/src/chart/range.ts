/** The range of a curve's values without outliers. */

/**
 * The range of the middle 96 % of the values, extended by half its length on either side, but not beyond the smallest
 * and the largest value. Null if there are no values.
 */
export function rangeWithoutOutliers(
  values: Iterable<number | null | undefined>
): [number, number] | null {
  const sorted = Float64Array.from(
    [...values].filter((value): value is number => typeof value === 'number')
  ).sort();
  if (sorted.length === 0) {
    return null;
  }
  const low = quantile(sorted, 0.02);
  const high = quantile(sorted, 0.98);
  const margin = (high - low) / 2;
  return [Math.max(sorted[0]!, low - margin), Math.min(sorted[sorted.length - 1]!, high + margin)];
}

/** The values without the first ones, which begin a run: at least one, and at most a twentieth more. */
export function withoutStart<T>(values: ArrayLike<T>): T[] {
  const all = Array.from(values);
  return all.length < 2 ? all : all.slice(Math.ceil(all.length / 20));
}

function quantile(sorted: Float64Array, share: number): number {
  return sorted[Math.round(share * (sorted.length - 1))]!;
}
