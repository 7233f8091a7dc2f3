import { describe, expect, it } from 'vitest';
import { ColumnTable } from '../src/chart/columns';
import { bandOf, blockSize, pickRows, RowPicker } from '../src/chart/decimate';

function tableOf(ys: number[]): ColumnTable {
  const table = new ColumnTable(2, 1);
  table.append(Float64Array.from([...ys.keys(), ...ys]), ys.length);
  return table;
}

const noise = (length: number) => Array.from({ length }, (_, index) => Math.sin(index * 12.9898) * 43758.5453);

describe('blockSize', () => {
  it('is a power of two that fits', () => {
    expect(blockSize(100, 100)).toBe(1);
    expect(blockSize(101, 100)).toBe(2);
    expect(blockSize(1_000_000, 1000)).toBe(1024);
  });
});

describe('RowPicker', () => {
  it('draws every row of a short column', () => {
    expect(new RowPicker(tableOf([5, 4, 3]), 1).pick(100)).toEqual([0, 1, 2]);
  });

  it('never loses a spike', () => {
    const ys = noise(100_000);
    ys[77_777] = 1e9;
    ys[12_345] = -1e9;
    const rows = new RowPicker(tableOf(ys), 1).pick(500);
    expect(rows).toContain(77_777);
    expect(rows).toContain(12_345);
    expect(rows.length).toBeLessThanOrEqual(1000);
  });

  it('draws complete blocks in the same way while the column grows', () => {
    const ys = noise(4096);
    const table = tableOf(ys.slice(0, 3000));
    const picker = new RowPicker(table, 1);
    const before = picker.pick(1024);
    table.append(Float64Array.from([...ys.slice(3000, 3500).keys(), ...ys.slice(3000, 3500)]), 500);
    const after = picker.pick(1024);
    const size = blockSize(3500, 1024);
    expect(blockSize(3000, 1024)).toBe(size);
    const full = Math.floor(3000 / size) * size;
    expect(after.filter(row => row < full)).toEqual(before.filter(row => row < full));
  });

  it('picks the same rows for one append as for many', () => {
    const ys = noise(10_000);
    const grown = new ColumnTable(2, 1);
    const picker = new RowPicker(grown, 1);
    for (let start = 0; start < ys.length; start += 137) {
      const part = ys.slice(start, start + 137);
      grown.append(Float64Array.from([...part.map((_, index) => start + index), ...part]), part.length);
      picker.pick(300);
    }
    expect(picker.pick(300)).toEqual(new RowPicker(tableOf(ys), 1).pick(300));
  });

  it('starts again after the table was cleared', () => {
    const table = tableOf(noise(1000));
    const picker = new RowPicker(table, 1);
    picker.pick(10);
    table.clear();
    expect(picker.pick(10)).toEqual([]);
  });
});

describe('pickRows', () => {
  it('picks from a range with blocks aligned to row 0', () => {
    const ys = Float64Array.from(noise(1000));
    const rows = pickRows(ys, 100, 900, 100);
    expect(rows[0]).toBeGreaterThanOrEqual(100);
    expect(rows.at(-1)).toBeLessThan(900);
    expect(rows.every((row, index) => index === 0 || row > rows[index - 1]!)).toBe(true);
  });
});

describe('bandOf', () => {
  it('is the range of each block of rows', () => {
    const ys = Float64Array.from([3, 1, 2, 4, 9, NaN, 7, 5]);
    const xs = Float64Array.from([0, 10, 20, 30, 40, 50, 60, 70]);
    const drawable = (row: number) => (Number.isFinite(ys[row]!) ? ys[row]! : null);
    const rows = pickRows(ys, 0, ys.length, 2);
    expect(bandOf(rows, blockSize(ys.length, 2), xs, drawable)).toEqual({
      xs: [20, 55],
      lows: [1, 5],
      highs: [4, 9]
    });
  });

  it('leaves out blocks without a value that can be drawn', () => {
    const ys = Float64Array.from([NaN, NaN, 2, 4]);
    const drawable = (row: number) => (Number.isFinite(ys[row]!) ? ys[row]! : null);
    const band = bandOf(pickRows(ys, 0, 4, 2), 2, Float64Array.from([1, 2, 3, 4]), drawable);
    expect(band).toEqual({ xs: [3.5], lows: [2], highs: [4] });
  });
});
