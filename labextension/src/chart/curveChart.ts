/** The chart of one value over steps, samples or time: a faint line for each rank and a bold one for their mean. */

import uPlot from 'uplot';
import type { IAxis } from './axis';
import { lowerBound, type ColumnTable } from './columns';
import { bandOf, blockSize, RowPicker, pickRows, type IBand } from './decimate';
import { formatNumber, formatSeconds, formatTicks, SECOND_STEPS } from './format';
import type { IMark } from '../generated/messages';
import { faint, MARK_COLORS, rankColor } from './palette';
import { rangeWithoutOutliers, withoutStart } from './range';
import type { IColumn, ILegendEntry } from './save';
import { SmoothedColumn } from './smooth';
import type { ITheme } from './theme';

/** Maximum number of ranks with a line; further ranks are in the mean only. */
const MAX_RANK_LINES = 16;

/** Tick distances of axes that count steps or samples: whole numbers. */
const WHOLE_STEPS = Array.from({ length: 14 }, (_, power) =>
  [1, 2, 5].map(digit => digit * 10 ** power)
).flat();

/** Maximum distance of the pointer from a mark, in pixels, at which the mark's text is shown. */
const MARK_TOLERANCE = 5;

/** Time that the pointer must rest before the kernel is queried for the values at its position. */
const HOVER_MS = 80;

/** Height in pixels below which a chart shows no axis label. */
const SMALL = 200;

const BAND_OPACITY = 0.18;

const LINEAR = uPlot.paths.linear!();

const MIN_AXIS_WIDTH = 52;
const MIN_DIGITS = 4;
const MAX_DIGITS = 10;

/** Maximum number of rows of a line that is not dashed, of which each point is marked. */
const MAX_MARKED_POINTS = 60;

/** A line in addition to those of this run's ranks, drawn below them: thin and dashed, or solid with marked points. */
export interface IExtraLine {
  readonly label: string;
  readonly table: ColumnTable;
  readonly column: number;
  readonly axis: IAxis;
  /** The line's color; null for the color of text. */
  readonly color: string | null;
  /** Whether the line is smoothed as the bold line is; its raw values are then not drawn. */
  readonly isSmoothed: boolean;
  readonly isDashed: boolean;
}

export interface ICurveInput {
  readonly label: string;
  readonly tables: ReadonlyMap<number, ColumnTable>;
  readonly column: number;
  readonly meanRank: number;
  readonly axis: IAxis;
  /** Weight of earlier values in the bold line's moving average, from 0 (no smoothing) to below 1. */
  readonly smoothing: number;
  /** Labels of lines that are not drawn; every change creates a new set. */
  readonly hidden: ReadonlySet<string>;
  readonly marks: readonly IMark[];
  readonly extra: readonly IExtraLine[];
  /** Whether the first values are outliers, as the times of first steps are: they are left out of the range. */
  readonly hasSlowStart?: boolean;
}

interface ILine {
  readonly rank: number;
  readonly label: string;
  readonly isBold: boolean;
  readonly table: ColumnTable;
  readonly column: number;
  readonly extra: IExtraLine | null;
  readonly picker: RowPicker;
  /** The smoothed values, drawn instead of the raw ones, which another, faint line may show; null: not smoothed. */
  readonly smoothed: SmoothedColumn | null;
  /** The area that is filled instead of a faint line with more rows than the chart has pixels; else null. */
  band: IBand | null;
}

/** A line's value at the pointer, or its last value if the pointer is not over the chart. */
export interface IReading {
  readonly label: string;
  readonly color: string;
  readonly isDashed: boolean;
  readonly value: number | null;
}

export class CurveChart {
  constructor(
    private readonly host: HTMLElement,
    private theme: ITheme,
    /** Called with the pointer's position, the lines' values there, and the marks near it. */
    private readonly onReadings: (
      x: number | null,
      readings: IReading[],
      marks: readonly IMark[]
    ) => void,
    /** Called with the first and the last step of the visible range. */
    private readonly onZoom: (first: number, last: number) => void,
    /** The name of the cursor, which charts of the same name share. */
    private readonly cursor: string
  ) {}

  /** The number of points of all lines in the latest drawing. */
  numDrawn = 0;

  setLogScale(isLog: boolean): void {
    if (isLog !== this.isLog) {
      this.isLog = isLog;
      this.rebuild();
    }
  }

  setFocus(isFocused: boolean): void {
    if (isFocused !== this.isFocused) {
      this.isFocused = isFocused;
      this.rebuild();
    }
  }

  setTheme(theme: ITheme): void {
    this.theme = theme;
    this.rebuild();
  }

  /** The current canvas; null if nothing is drawn. */
  get canvas(): HTMLCanvasElement | null {
    return this.plot?.ctx.canvas ?? null;
  }

  /** All values of the lines, including those that are not drawn. */
  columns(): IColumn[] {
    return this.lines.map(line => ({
      label: line.smoothed === null ? line.label : `${line.label}, smoothed`,
      xs: this.positionsOf(line),
      ys: this.valuesOf(line)
    }));
  }

  /** The legend's entries for the drawn lines; each label occurs once. */
  legend(): ILegendEntry[] {
    const entries = this.lines
      .map((line, index) => ({
        label: line.label,
        color: this.colorOf(index),
        isDashed: line.extra?.isDashed ?? false
      }))
      .filter(entry => !(this.input?.hidden.has(entry.label) ?? false));
    return [...new Map(entries.map(entry => [entry.label, entry])).values()];
  }

  /** The number of digits that distinguish values in the visible range. */
  get numDigits(): number {
    const { min, max } = this.plot?.scales.y ?? {};
    if (typeof min !== 'number' || typeof max !== 'number' || max <= min) {
      return MIN_DIGITS;
    }
    const needed = Math.ceil(Math.log10(Math.max(-min, max) / (max - min))) + 2;
    return Math.min(MAX_DIGITS, Math.max(MIN_DIGITS, needed));
  }

  /**
   * Zoom: the new range is `factor` times the visible one, and centred at `centre`, a fraction of the visible one. At
   * the ends of the lines it keeps its width.
   */
  zoomBy(factor: number, centre: number): void {
    const { min, max } = this.plot?.scales.x ?? {};
    if (typeof min !== 'number' || typeof max !== 'number') {
      return;
    }
    const [first, last] = this.extent();
    const width = Math.min((max - min) * factor, last - first);
    const middle = min + (max - min) * centre;
    const from = Math.min(Math.max(first, middle - width / 2), last - width);
    this.zoom = width === last - first ? null : [from, from + Math.max(width, 1e-9)];
    this.refresh();
    this.reportZoom();
  }

  resize(width: number, height: number): void {
    if (width === this.width && height === this.height) {
      return;
    }
    this.width = width;
    this.height = height;
    if (this.plot) {
      this.plot.setSize({ width, height });
      this.refresh();
    }
  }

  draw(input: ICurveInput): void {
    const hasOtherLines = this.updateLines(input);
    const hides = this.input?.hidden !== input.hidden;
    this.input = input;
    if (this.plot === null || hasOtherLines || hides) {
      this.rebuild();
    } else {
      this.refresh();
    }
  }

  dispose(): void {
    clearTimeout(this.hoverTimer);
    this.plot?.destroy();
    this.plot = null;
  }

  /** Update the list of lines; returns whether it has changed. */
  private updateLines(input: ICurveInput): boolean {
    const lineSources = linesOf(input);
    const isSame =
      lineSources.length === this.lineSources.length &&
      this.column === input.column &&
      this.axis === input.axis &&
      this.smoothing === input.smoothing &&
      lineSources.every((line, index) => {
        const now = this.lineSources[index];
        return now?.table === line.table && now.isBold === line.isBold && now.label === line.label;
      });
    if (isSame) {
      return false;
    }
    if (this.column !== input.column || this.axis !== input.axis) {
      this.zoom = null;
    }
    this.column = input.column;
    this.axis = input.axis;
    this.smoothing = input.smoothing;
    this.lineSources = lineSources;
    this.lines = lineSources.flatMap(line => this.linesFor(line, input));
    return true;
  }

  private linesFor(line: ILineSource, { smoothing }: ICurveInput): ILine[] {
    const { table, column } = line;
    const picker = new RowPicker(table, column);
    if (smoothing > 0 && line.extra?.isSmoothed) {
      // The rows of earlier runs are thinned: adapt the weight to the number of steps per row.
      const weight = smoothing ** stepsPerRow(table);
      return [{ ...line, picker, smoothed: new SmoothedColumn(table, column, weight), band: null }];
    }
    if (!line.isBold || smoothing === 0) {
      return [{ ...line, picker, smoothed: null, band: null }];
    }
    const smoothed = new SmoothedColumn(table, column, smoothing);
    return [
      { ...line, isBold: false, picker, smoothed: null, band: null },
      { ...line, picker: new RowPicker(table, column), smoothed, band: null }
    ];
  }

  private rebuild(): void {
    this.plot?.destroy();
    this.plot = null;
    if (this.width < 40 || this.height < 40 || this.lines.length === 0) {
      return;
    }
    this.axisWidth = MIN_AXIS_WIDTH;
    this.plot = new uPlot(this.options(), this.data(), this.host);
    if (this.zoom) {
      this.plot.setScale('x', { min: this.zoom[0], max: this.zoom[1] });
    }
    this.report();
  }

  private refresh(): void {
    if (this.plot === null) {
      this.rebuild();
      return;
    }
    this.plot.setData(this.data(), this.zoom === null);
    if (this.zoom) {
      this.plot.setScale('x', { min: this.zoom[0], max: this.zoom[1] });
    }
    this.report();
  }

  private data(): uPlot.AlignedData {
    const tables = this.lines.map(line => this.pointsOf(line));
    this.numDrawn = tables.reduce((sum, [xs]) => sum + xs.length, 0);
    return uPlot.join(tables);
  }

  private pointsOf(line: ILine): [number[], (number | null)[]] {
    const xs = this.positionsOf(line);
    const ys = this.valuesOf(line);
    const maxBlocks = Math.max(64, this.width);
    let rows: number[];
    let from = 0;
    let to = xs.length;
    if (this.zoom === null) {
      rows = line.picker.pick(maxBlocks);
    } else {
      from = Math.max(0, lowerBound(xs, this.zoom[0]) - 1);
      to = Math.min(xs.length, lowerBound(xs, this.zoom[1]) + 2);
      rows = pickRows(ys, from, to, maxBlocks);
    }
    const size = blockSize(to - from, maxBlocks);
    const isFaint = !line.isBold && line.extra === null;
    line.band = isFaint && size > 1 ? bandOf(rows, size, xs, row => this.drawable(ys[row]!)) : null;
    return [rows.map(row => xs[row]!), rows.map(row => this.drawable(ys[row]!))];
  }

  private positionsOf(line: ILine): Float64Array {
    const axis = line.extra?.axis ?? this.axis;
    return axis?.positions(line.rank, line.table) ?? line.table.column(0);
  }

  private valuesOf(line: ILine): Float64Array {
    return line.smoothed?.values() ?? line.table.column(line.column);
  }

  private extent(): [number, number] {
    const ends = this.lines.map(line => this.positionsOf(line)).filter(xs => xs.length > 0);
    return [Math.min(...ends.map(xs => xs[0]!)), Math.max(...ends.map(xs => xs[xs.length - 1]!))];
  }

  /** The value, or null, which is a gap, for NaN, infinities, and values that a log scale cannot show. */
  private drawable(value: number): number | null {
    return Number.isFinite(value) && (!this.isLog || value > 0) ? value : null;
  }

  private options(): uPlot.Options {
    const { theme } = this;
    const isTime = this.axis?.isTime ?? false;
    const axis = {
      stroke: theme.faintInk,
      font: theme.font,
      grid: { stroke: theme.grid, width: 1 },
      ticks: { stroke: theme.grid, width: 1, size: 4 }
    };
    return {
      width: this.width,
      height: this.height,
      padding: [8, 24, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        points: { size: 6, width: 1.5, fill: (_plot, index) => this.colorOf(index - 1) },
        drag: { x: true, y: false },
        sync: { key: this.cursor, scales: ['x', null], setSeries: false },
        bind: { dblclick: () => () => this.resetZoom() }
      },
      scales: {
        x: {
          time: false,
          range: (_plot, min, max) => (min === max ? [min - 1, max + 1] : [min, max])
        },
        y: this.isLog
          ? {
              distr: 3,
              range: (_plot, min, max) =>
                min === null || max === null || !(min > 0)
                  ? [0.1, 1]
                  : uPlot.rangeLog(min, max, 10, false)
            }
          : this.isFocused || (this.input?.hasSlowStart ?? false)
            ? { range: (plot, min, max) => this.focusedRange(plot) ?? [min, max] }
            : {}
      },
      axes: [
        {
          ...axis,
          ...(this.height < SMALL
            ? {}
            : { label: isTime ? 'time' : (this.axis?.label ?? 'step'), labelSize: 14 }),
          labelFont: theme.font,
          labelGap: 0,
          size: this.height < SMALL ? 22 : 26,
          gap: 4,
          space: 70,
          incrs: isTime ? SECOND_STEPS : WHOLE_STEPS,
          values: (_plot, ticks, _axis, _space, step) =>
            isTime ? ticks.map(formatSeconds) : formatTicks(ticks, step)
        },
        {
          ...axis,
          size: (plot, texts) => this.verticalAxisWidth(plot, texts),
          gap: 4,
          values: (_plot, ticks, _axis, _space, step) =>
            this.isLog ? ticks.map(logTickText) : formatTicks(ticks, step)
        }
      ],
      series: [{}, ...this.lines.map((line, index) => this.series(line, index))],
      hooks: {
        draw: [plot => this.drawMarks(plot), plot => this.drawEmptyNotice(plot)],
        setCursor: [plot => this.report(plot.cursor.idx)],
        setSelect: [plot => this.zoomTo(plot)]
      }
    };
  }

  /** The width of the vertical axis: that of its longest text. It never shrinks, so that the chart does not jump. */
  private verticalAxisWidth(plot: uPlot, texts: readonly string[] | null): number {
    if (texts !== null) {
      plot.ctx.font = this.theme.font;
      const widths = texts.map(text => plot.ctx.measureText(text).width);
      this.axisWidth = Math.max(this.axisWidth, Math.ceil(Math.max(...widths)) + 12);
    }
    return this.axisWidth;
  }

  private focusedRange(plot: uPlot): [number, number] | null {
    const hasSlowStart = this.input?.hasSlowStart ?? false;
    const lines = plot.data
      .slice(1)
      .filter((_, index) => plot.series[index + 1]?.show ?? true)
      .map(values => (hasSlowStart ? withoutStart(values) : values));
    const found = rangeWithoutOutliers(lines.flatMap(values => [...values]));
    return found === null || found[0] === found[1] ? null : found;
  }

  private series(line: ILine, index: number): uPlot.Series {
    const color = this.colorOf(index);
    const { extra } = line;
    const maxMarked = extra !== null && !extra.isDashed ? MAX_MARKED_POINTS : 2;
    return {
      label: line.label,
      show: !(this.input?.hidden.has(line.label) ?? false),
      stroke: line.isBold || extra ? color : faint(color, this.smoothing > 0 ? 0.3 : 0.5),
      width: line.isBold ? 2 : extra === null ? 1 : extra.isDashed ? 1.25 : 1.75,
      ...(extra?.isDashed ? { dash: [5, 4] } : {}),
      paths: (plot, series, first, last) =>
        line.band === null
          ? LINEAR(plot, series, first, last)
          : bandPath(plot, line.band, faint(color, BAND_OPACITY)),
      points: {
        show: () => line.table.length <= maxMarked,
        size: 5,
        ...(extra?.isDashed === false ? { fill: color } : {})
      },
      spanGaps: false
    };
  }

  private colorOf(index: number): string {
    const line = this.lines[index];
    if (line === undefined) {
      return this.theme.ink;
    }
    if (line.extra !== null) {
      return line.extra.color ?? this.theme.ink;
    }
    return line.rank < 0 ? this.theme.ink : rankColor(line.rank);
  }

  private drawMarks(plot: uPlot): void {
    const { ctx, bbox } = plot;
    const ratio = uPlot.pxRatio;
    ctx.save();
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    for (const mark of this.input?.marks ?? []) {
      const left = plot.valToPos(this.axis?.positionOf(mark.x) ?? mark.x, 'x', true);
      if (!(left >= bbox.left && left <= bbox.left + bbox.width)) {
        continue;
      }
      ctx.strokeStyle = MARK_COLORS[mark.kind];
      ctx.fillStyle = MARK_COLORS[mark.kind];
      // Checkpoints are frequent, so each is only a tick, and not a line through the curve.
      if (mark.kind !== 'checkpoint') {
        ctx.beginPath();
        ctx.moveTo(left, bbox.top);
        ctx.lineTo(left, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.beginPath();
      ctx.moveTo(left - 4 * ratio, bbox.top);
      ctx.lineTo(left + 4 * ratio, bbox.top);
      ctx.lineTo(left, bbox.top + 6 * ratio);
      ctx.fill();
    }
    ctx.restore();
  }

  /** Draw a notice if no line has a value that can be drawn. */
  private drawEmptyNotice({ ctx, bbox, data }: uPlot): void {
    if (data.slice(1).some(values => values.some(value => typeof value === 'number'))) {
      return;
    }
    const ratio = uPlot.pxRatio;
    ctx.save();
    ctx.font = this.theme.font.replace(/^\d+/, size => String(Number(size) * ratio));
    ctx.fillStyle = this.theme.faintInk;
    ctx.textAlign = 'center';
    ctx.textBaseline = 'middle';
    const text = this.isLog ? 'no values greater than zero' : 'no finite values';
    ctx.fillText(text, bbox.left + bbox.width / 2, bbox.top + bbox.height / 2);
    ctx.restore();
  }

  private zoomTo(plot: uPlot): void {
    if (plot.select.width > 4) {
      this.zoom = [
        plot.posToVal(plot.select.left, 'x'),
        plot.posToVal(plot.select.left + plot.select.width, 'x')
      ];
      queueMicrotask(() => {
        this.refresh();
        this.reportZoom();
      });
    }
  }

  private reportZoom(): void {
    const longest = this.lines
      .filter(line => line.extra === null)
      .reduce<ILine | null>(
        (best, line) => (best === null || line.table.length > best.table.length ? line : best),
        null
      );
    if (this.zoom !== null && longest !== null) {
      const xs = this.positionsOf(longest);
      const steps = longest.table.column(0);
      const first = steps[Math.max(0, lowerBound(xs, this.zoom[0]) - 1)];
      const last = steps[Math.min(steps.length - 1, lowerBound(xs, this.zoom[1]) + 1)];
      if (first !== undefined && last !== undefined) {
        this.onZoom(first, last);
      }
    }
  }

  private resetZoom(): null {
    this.zoom = null;
    this.refresh();
    return null;
  }

  private report(index?: number | null): void {
    const data = this.plot?.data;
    const at = index ?? this.hoveredIndex();
    const x = at === null ? null : (data?.[0][at] ?? null);
    const bold = this.lines.find(line => line.isBold);
    const boldPositions = bold === undefined ? [] : this.positionsOf(bold);
    const end = boldPositions[boldPositions.length - 1];
    let isMissing = false;
    const readings = this.lines.map((line, lineIndex) => {
      const xs = this.positionsOf(line);
      const ys = this.valuesOf(line);
      // Without a pointer the ranks are read at the mean's last step: some are ahead of the others.
      const value =
        x === null ? lastValue(xs, ys, line.extra === null ? end : undefined) : valueAt(xs, ys, x);
      isMissing ||= value === null && line.extra === null && x !== null && isInside(xs, x);
      return {
        label: line.label,
        color: this.colorOf(lineIndex),
        isDashed: line.extra?.isDashed ?? false,
        value
      };
    });
    if (isMissing && x !== null) {
      this.requestValues(x);
    }
    this.onReadings(x, readings, x === null ? [] : this.marksAt(this.plot?.cursor.left ?? -1));
  }

  /** The index of the point at the pointer, which new data changes while the pointer rests. */
  private hoveredIndex(): number | null {
    const left = this.plot?.cursor.left ?? -1;
    return this.plot === null || left < 0 ? null : this.plot.posToIdx(left);
  }

  /** Query the values of all lines at a position where the pointer rests, once. */
  private requestValues(x: number): void {
    if (x === this.hoveredX) {
      return;
    }
    this.hoveredX = x;
    clearTimeout(this.hoverTimer);
    const line = this.lines.find(each => each.extra === null && this.rowAt(each, x) !== null);
    const row = line === undefined ? null : this.rowAt(line, x);
    if (line !== undefined && row !== null) {
      const step = line.table.column(0)[row]!;
      this.hoverTimer = setTimeout(() => this.onZoom(step, step), HOVER_MS);
    }
  }

  private rowAt(line: ILine, x: number): number | null {
    const xs = this.positionsOf(line);
    const row = lowerBound(xs, x);
    return xs[row] === x ? row : null;
  }

  private marksAt(left: number): IMark[] {
    return (this.input?.marks ?? []).filter(mark => {
      const markLeft =
        this.plot?.valToPos(this.axis?.positionOf(mark.x) ?? mark.x, 'x') ?? Infinity;
      return Math.abs(markLeft - left) <= MARK_TOLERANCE;
    });
  }

  private plot: uPlot | null = null;
  private input: ICurveInput | null = null;
  private lineSources: ILineSource[] = [];
  private lines: ILine[] = [];
  private column = 0;
  private axis: IAxis | null = null;
  private smoothing = 0;
  private isFocused = false;
  private axisWidth = MIN_AXIS_WIDTH;
  private width = 0;
  private height = 0;
  private isLog = false;
  private zoom: [number, number] | null = null;
  private hoveredX: number | null = null;
  private hoverTimer: ReturnType<typeof setTimeout> | undefined;
}

type ILineSource = Omit<ILine, 'picker' | 'smoothed' | 'band'>;

/** The lines to draw. A single rank's line is bold, without a mean. The bold line is last, and drawn on top. */
function linesOf(input: ICurveInput): ILineSource[] {
  const ranks = [...input.tables.keys()]
    .filter(rank => rank !== input.meanRank)
    .sort((a, b) => a - b);
  const mean = input.tables.get(input.meanRank);
  const hasMean = mean !== undefined && mean.length > 0 && ranks.length > 1;
  const { column } = input;
  const lines: ILineSource[] = ranks.slice(0, MAX_RANK_LINES).map(rank => ({
    rank,
    label: ranks.length > 1 ? `rank ${rank}` : input.label,
    isBold: ranks.length === 1,
    table: input.tables.get(rank)!,
    column,
    extra: null
  }));
  if (hasMean) {
    const rank = input.meanRank;
    lines.push({ rank, label: 'mean', isBold: true, table: mean, column, extra: null });
  }
  const taken = new Set(lines.map(line => line.label));
  const extra = input.extra.map(line => {
    const label = uniqueLabel(taken, line.label);
    taken.add(label);
    const { table, column } = line;
    return { rank: 0, label, isBold: false, table, column, extra: line };
  });
  return [...extra, ...lines];
}

/** The label, with a number if another line has it: labels identify lines. */
function uniqueLabel(taken: ReadonlySet<string>, label: string): string {
  let number = 2;
  let unique = label;
  while (taken.has(unique)) {
    unique = `${label} (${number++})`;
  }
  return unique;
}

/** The value at `x`; null if the line has no point there, since each line is thinned separately. */
export function valueAt(xs: ArrayLike<number>, ys: ArrayLike<number>, x: number): number | null {
  const row = lowerBound(xs, x);
  return xs[row] === x ? (ys[row] ?? null) : null;
}

/** The value at `end`, or the last one of a line that has none there. */
export function lastValue(
  xs: ArrayLike<number>,
  ys: ArrayLike<number>,
  end: number | undefined
): number | null {
  return (end === undefined ? null : valueAt(xs, ys, end)) ?? ys[ys.length - 1] ?? null;
}

/** The area between the lowest and the highest values. */
function bandPath(plot: uPlot, { xs, lows, highs }: IBand, color: string): uPlot.Series.Paths {
  const fill = new Path2D();
  const lefts = xs.map(x => plot.valToPos(x, 'x', true));
  highs.forEach((high, at) => fill.lineTo(lefts[at]!, plot.valToPos(high, 'y', true)));
  for (let at = lows.length - 1; at >= 0; at--) {
    fill.lineTo(lefts[at]!, plot.valToPos(lows[at]!, 'y', true));
  }
  fill.closePath();
  return { stroke: null, fill, _fill: color, flags: 0 };
}

function isInside(xs: Float64Array, x: number): boolean {
  return xs.length > 0 && x >= xs[0]! && x <= xs[xs.length - 1]!;
}

function stepsPerRow(table: ColumnTable): number {
  const steps = table.column(0);
  const covered = steps.length > 1 ? steps[steps.length - 1]! - steps[0]! : 0;
  return covered > 0 ? covered / (steps.length - 1) : 1;
}

function logTickText(value: number | null): string {
  return value === null ? '' : formatNumber(value);
}
