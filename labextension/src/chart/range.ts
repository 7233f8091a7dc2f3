/** The range of values that most of a curve lies in. */

/**
 * A range that leaves outliers out: the middle 96 % of the values and half as much again on either side, but never
 * beyond the values. Null where there is nothing to see.
 */
export function usualRange(values: Iterable<number | null | undefined>): [number, number] | null {
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

function quantile(sorted: Float64Array, share: number): number {
  return sorted[Math.round(share * (sorted.length - 1))]!;
}
