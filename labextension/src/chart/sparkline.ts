/** A curve as small as a word: an SVG path, and the place of its end. */

import { usualRange } from './range';

export interface ISparkline {
  readonly path: string;
  /** Where the curve ends; a curve of one point is this place only. */
  readonly end: readonly [number, number];
}

/** The curve in a box of that size; outliers lie on its edge. Null where there is nothing to draw. */
export function sparkline(
  xs: readonly number[],
  ys: readonly number[],
  width: number,
  height: number
): ISparkline | null {
  const range = usualRange(ys);
  const first = xs[0];
  const last = xs[xs.length - 1];
  if (range === null || first === undefined || last === undefined || xs.length !== ys.length) {
    return null;
  }
  const [low, high] = range;
  const places = xs.map((x, index): [number, number] => [
    rounded(last > first ? ((x - first) / (last - first)) * width : width),
    rounded(high > low ? (1 - share(ys[index]!, low, high)) * height : height / 2)
  ]);
  const path = places.map(([x, y], index) => `${index === 0 ? 'M' : 'L'}${x} ${y}`).join('');
  return { path, end: places[places.length - 1]! };
}

function share(value: number, low: number, high: number): number {
  return Math.min(1, Math.max(0, (value - low) / (high - low)));
}

function rounded(value: number): number {
  return Math.round(value * 10) / 10;
}
