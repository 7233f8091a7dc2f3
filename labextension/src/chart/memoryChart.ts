/** The stacked chart of one rank's memory use over time. */

import uPlot from 'uplot';
import { lowerBound, type ColumnTable } from './columns';
import { RowPicker } from './decimate';
import { formatBytes, formatSeconds, SECOND_STEPS } from './format';
import { MEMORY_CATEGORIES } from './palette';
import type { ITheme } from './theme';

const TOTAL_COLUMN = 7;
const FREE_COLUMN = 6;

/** Tick distances in bytes: powers of two, so that ticks are at whole MiB and GiB. */
const BYTE_STEPS = Array.from({ length: 44 }, (_, power) => 2 ** (power + 6));

/** Memory use at one moment, in bytes; `values` are in the order of `MEMORY_CATEGORIES`. */
export interface IMemoryReading {
  readonly timeS: number;
  readonly values: readonly number[];
  readonly total: number;
  readonly peak: number;
  readonly free: number;
}

export class MemoryChart {
  constructor(
    private readonly host: HTMLElement,
    private theme: ITheme,
    private readonly table: ColumnTable,
    private readonly onReading: (reading: IMemoryReading | null) => void
  ) {
    this.picker = new RowPicker(table, TOTAL_COLUMN);
  }

  /** Whether a category, by its place in `MEMORY_CATEGORIES`, has had any bytes. */
  has(category: number): boolean {
    return this.table.column(MEMORY_CATEGORIES[category]!.column).some(bytes => bytes > 0);
  }

  setTheme(theme: ITheme): void {
    this.theme = theme;
    this.plot?.destroy();
    this.plot = null;
    this.draw(this.top, this.end, this.hasTimeAxis);
  }

  resize(width: number, height: number): void {
    if (width !== this.width || height !== this.height) {
      this.width = width;
      this.height = height;
      this.plot?.setSize({ width, height });
    }
  }

  /** Draw with the scales that all ranks share, which end at `top` bytes and `end` seconds. */
  draw(top: number, end: number, hasTimeAxis: boolean): void {
    if (hasTimeAxis !== this.hasTimeAxis) {
      this.plot?.destroy();
      this.plot = null;
    }
    this.top = top;
    this.end = end;
    this.hasTimeAxis = hasTimeAxis;
    if (this.width < 40 || this.height < 30) {
      return;
    }
    if (this.plot === null) {
      this.plot = new uPlot(this.options(), this.data(), this.host);
    } else {
      this.plot.setData(this.data());
    }
    this.report();
  }

  /** The largest total so far, in bytes. */
  peak(): number {
    const totals = this.table.column(TOTAL_COLUMN);
    for (; this.numSeen < totals.length; this.numSeen++) {
      this.highest = Math.max(this.highest, totals[this.numSeen]!);
    }
    this.numSeen = Math.min(this.numSeen, totals.length);
    return this.highest;
  }

  dispose(): void {
    this.plot?.destroy();
    this.plot = null;
  }

  /** Running sums from the bottom layer up, in reverse order: uPlot draws later series over earlier ones. */
  private data(): uPlot.AlignedData {
    const found = this.picker.pick(Math.max(64, this.width));
    const rows = found.length === 1 ? [...found, ...found] : found; // a single row would have no width
    const sums = rows.map(() => 0);
    const layers = MEMORY_CATEGORIES.map(category => {
      const column = this.table.column(category.column);
      return rows.map((row, index) => {
        const value = column[row]!;
        sums[index] = sums[index]! + (value > 0 ? value : 0);
        return sums[index];
      });
    });
    const times = rows.map(row => this.table.column(0)[row]!);
    if (found.length === 1) {
      times[1] = Math.max(this.end, times[0]! + 1e-3);
    }
    return [times, ...layers.reverse()];
  }

  private options(): uPlot.Options {
    const { theme } = this;
    const axis = {
      stroke: theme.faintInk,
      font: theme.font,
      grid: { stroke: theme.grid, width: 1 },
      ticks: { stroke: theme.grid, width: 1, size: 4 }
    };
    return {
      width: this.width,
      height: this.height,
      padding: [6, 12, this.hasTimeAxis ? 0 : 6, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false } },
      scales: {
        x: { time: false, range: (_plot, min) => [min, Math.max(this.end, min + 1e-3)] },
        y: { range: () => [0, Math.max(this.top, 1) * 1.08] }
      },
      axes: [
        {
          ...axis,
          show: this.hasTimeAxis,
          size: 30,
          gap: 4,
          space: 60,
          incrs: SECOND_STEPS,
          values: (_plot, ticks) => ticks.map(formatSeconds)
        },
        {
          ...axis,
          size: 62,
          gap: 4,
          space: 28,
          incrs: BYTE_STEPS,
          values: (_plot, ticks) => ticks.map(tick => (tick === 0 ? '0' : formatBytes(tick)))
        }
      ],
      series: [
        {},
        ...[...MEMORY_CATEGORIES].reverse().map(category => ({
          label: category.label,
          fill: category.color,
          stroke: category.color,
          width: 1,
          points: { show: false }
        }))
      ],
      hooks: { setCursor: [plot => this.report(plot.cursor.idx)] }
    };
  }

  private report(index?: number | null): void {
    const { table } = this;
    if (table.length === 0) {
      this.onReading(null);
      return;
    }
    const times = table.column(0);
    const x = index === undefined || index === null ? null : (this.plot?.data[0][index] ?? null);
    const row = x === null ? table.length - 1 : Math.min(lowerBound(times, x), table.length - 1);
    const at = (column: number) => table.column(column)[row] ?? 0;
    this.onReading({
      timeS: at(0),
      values: MEMORY_CATEGORIES.map(category => at(category.column)),
      total: at(TOTAL_COLUMN),
      peak: this.peak(),
      free: at(FREE_COLUMN)
    });
  }

  private readonly picker: RowPicker;
  private plot: uPlot | null = null;
  private width = 0;
  private height = 0;
  private top = 0;
  private end = 0;
  private hasTimeAxis = true;
  private highest = 0;
  private numSeen = 0;
}
