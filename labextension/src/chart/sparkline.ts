/** A word-sized curve: an SVG path, and the position of its end. */

import { rangeWithoutOutliers } from './range';

export interface ISparkline {
  readonly path: string;
  /** The position of the last point, which is the whole curve if there is only one point. */
  readonly end: readonly [number, number];
}

/** The curve in a box of the given size, with outliers on its edge; null if there is nothing to draw. */
export function sparkline(
  xs: readonly number[],
  ys: readonly number[],
  width: number,
  height: number
): ISparkline | null {
  const range = rangeWithoutOutliers(ys);
  const first = xs[0];
  const last = xs[xs.length - 1];
  if (range === null || first === undefined || last === undefined || xs.length !== ys.length) {
    return null;
  }
  const [low, high] = range;
  const positions = xs.map((x, index): [number, number] => [
    rounded(last > first ? ((x - first) / (last - first)) * width : width),
    rounded(high > low ? (1 - share(ys[index]!, low, high)) * height : height / 2)
  ]);
  const path = positions.map(([x, y], index) => `${index === 0 ? 'M' : 'L'}${x} ${y}`).join('');
  return { path, end: positions[positions.length - 1]! };
}

function share(value: number, low: number, high: number): number {
  return Math.min(1, Math.max(0, (value - low) / (high - low)));
}

function rounded(value: number): number {
  return Math.round(value * 10) / 10;
}
