import { describe, expect, it } from 'vitest';
import { ColumnTable, extremes, lowerBound } from '../src/chart/columns';

/** A block of two columns: x counts on from `start`, y is given. */
function block(start: number, ys: number[]): Float64Array {
  return Float64Array.from([...ys.map((_, index) => start + index), ...ys]);
}

describe('ColumnTable', () => {
  it('stores rows by column while it grows', () => {
    const table = new ColumnTable(2, 1);
    for (let start = 0; start < 1000; start += 100) {
      table.append(
        block(
          start,
          Array.from({ length: 100 }, (_, index) => (start + index) * 2)
        ),
        100
      );
    }
    expect(table.length).toBe(1000);
    expect(table.column(0)[999]).toBe(999);
    expect(table.column(1)[999]).toBe(1998);
    expect(table.generation).toBe(0);
  });

  it('inserts rows between existing ones and keeps the others', () => {
    const table = new ColumnTable(2, 1);
    table.append(Float64Array.of(1, 4, 8, 9, 10, 40, 80, 90), 4);
    const detail = Float64Array.of(4, 5, 6, 7, 8, 40, 50, 60, 70, 80);
    table.refine(detail, 5, 3, 8);
    expect([...table.column(0)]).toEqual([1, 4, 5, 6, 7, 8, 9]);
    expect([...table.column(1)]).toEqual([10, 40, 50, 60, 70, 80, 90]);
    expect(table.generation).toBe(1);
    table.append(Float64Array.of(10, 100), 1);
    expect(table.length).toBe(8);
    table.refine(detail, 5, 3, 8);
    expect(table.generation).toBe(1); // nothing new
  });

  it('ignores rows after its newest one, which later messages contain', () => {
    const table = new ColumnTable(2, 1);
    table.append(Float64Array.of(1, 3, 10, 30), 2);
    table.refine(Float64Array.of(1, 2, 3, 4, 5, 10, 20, 30, 40, 50), 5, 1, 5);
    expect([...table.column(0)]).toEqual([1, 2, 3]);
  });

  it('refuses a block of the wrong size', () => {
    expect(() => new ColumnTable(2, 1).append(new Float64Array(3), 2)).toThrow(RangeError);
  });

  it('thins older rows above the limit and keeps a spike and the newest rows', () => {
    const table = new ColumnTable(2, 1, 10_000);
    const ys = Array.from({ length: 10_001 }, (_, index) => (index === 1234 ? 99 : Math.sin(index)));
    table.append(block(0, ys), ys.length);
    expect(table.length).toBeLessThan(8000);
    expect(table.generation).toBe(1);
    expect(Math.max(...table.column(1))).toBe(99);
    expect([...table.column(0).slice(-4096)]).toEqual(
      Array.from({ length: 4096 }, (_, index) => 10_001 - 4096 + index)
    );
    const xs = table.column(0);
    expect(xs.every((x, row) => row === 0 || x > xs[row - 1]!)).toBe(true);
  });

  it('stays bounded under many appends', () => {
    const table = new ColumnTable(2, 1, 10_000);
    for (let start = 0; start < 200_000; start += 1000) {
      table.append(block(start, new Array<number>(1000).fill(start)), 1000);
      expect(table.length).toBeLessThanOrEqual(10_000);
    }
  });
});

describe('extremes', () => {
  it('returns the lowest and the highest in row order', () => {
    expect(extremes(Float64Array.of(3, 9, 1, 4), 0, 4)).toEqual([1, 2]);
  });

  it('ignores values that are not finite', () => {
    expect(extremes(Float64Array.of(NaN, 2, Infinity, 1), 0, 4)).toEqual([1, 3]);
    expect(extremes(Float64Array.of(NaN, NaN), 0, 2)).toEqual([0, 0]);
  });
});

describe('lowerBound', () => {
  it('finds the first row that is not less', () => {
    const xs = Float64Array.of(1, 3, 3, 7);
    expect([0, 1, 2, 3, 7, 8].map(x => lowerBound(xs, x))).toEqual([0, 0, 1, 1, 3, 4]);
  });
});
