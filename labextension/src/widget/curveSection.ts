/** A chart with its legend: the lines to draw, their values at the pointer, and keys to zoom and move. */

import { positionText, STEP_AXIS, type IAxis } from '../chart/axis';
import { CurveChart, type IExtraLine, type IReading } from '../chart/curveChart';
import { capText, formatMilliseconds, formatNumber } from '../chart/format';
import { earlierColor, markText, validationColor } from '../chart/palette';
import type { ITheme } from '../chart/theme';
import type { AxisName } from '../model/earlierRuns';
import { LEARNING_RATE, type ICurve, type PanelModel } from '../model/panelModel';
import { MEAN_RANK, type IMark } from '../generated/messages';
import { element, paintSwatch, setText } from './dom';

const KEYS_HINT = 'Plus and minus zoom, arrows move, 0 shows all';

const KEYS: Readonly<Record<string, { factor: number; centre: number }>> = {
  '+': { factor: 0.5, centre: 0.5 },
  '=': { factor: 0.5, centre: 0.5 },
  '-': { factor: 2, centre: 0.5 },
  '0': { factor: 1e9, centre: 0.5 },
  ArrowLeft: { factor: 1, centre: 0.3 },
  ArrowRight: { factor: 1, centre: 0.7 }
};

/** Maximum number of lines in the legend. */
const MAX_LEGEND = 12;

/** Maximum number of characters of a label in the legend, and of the texts of marks. */
const MAX_LABEL = 32;
const MAX_MARKED = 100;

export class CurveSection {
  constructor(
    private readonly model: PanelModel,
    theme: ITheme,
    private readonly signal: AbortSignal,
    cursor: string
  ) {
    this.chart = new CurveChart(
      this.plot,
      theme,
      (x, readings, marks) => this.showReadings(x, readings, marks),
      (first, last) => {
        if (this.curve !== null) {
          model.queryDetail(this.curve, first, last);
        }
      },
      cursor
    );
    this.node = element(
      'div',
      'accel-nb-section',
      element('div', 'accel-nb-legend', this.legendTitle, this.legend),
      element('div', 'accel-nb-plot-box', this.plot, this.marked)
    );
    this.plot.tabIndex = 0;
    this.plot.setAttribute('role', 'group');
    this.plot.title = KEYS_HINT;
    this.plot.addEventListener('keydown', event => this.onKey(event), { signal });
  }

  readonly node: HTMLElement;
  readonly chart: CurveChart;
  axisName: AxisName = 'step';
  /** Weight of earlier values in the bold line's moving average; null chooses it by the number of points. */
  smoothing: number | null = null;
  /** Whether earlier runs are drawn too. */
  compares = false;

  draw(curve: ICurve | null, height: number): void {
    if (curve === null) {
      return;
    }
    this.curve = curve;
    const axis = this.axis;
    this.chart.resize(this.plot.clientWidth, height);
    this.chart.draw({
      label: curve.label,
      tables: curve.tables,
      column: curve.column,
      meanRank: MEAN_RANK,
      axis,
      smoothing: this.smoothing ?? automaticSmoothing(curve),
      hidden: this.hidden,
      marks: this.model.marks,
      hasSlowStart: curve.unit === 'ms',
      extra: [
        ...this.plannedLines(curve),
        ...(this.compares ? this.earlierLines(curve) : []),
        ...this.validationLines(curve)
      ]
    });
    this.node.dataset.pointsDrawn = String(this.chart.numDrawn);
    this.plot.setAttribute('aria-label', `${curve.label} over ${axis.label}. ${KEYS_HINT}`);
    this.height = height;
  }

  /** The horizontal axis. */
  get axis(): IAxis {
    return this.model.axes[this.axisName];
  }

  /** The planned learning rates; only over steps, since the samples and the time of future steps are unknown. */
  private plannedLines(curve: ICurve): IExtraLine[] {
    if (curve.id !== LEARNING_RATE || this.axisName !== 'step') {
      return [];
    }
    return this.model.plans.map(table => ({
      label: 'planned',
      table,
      column: 1,
      axis: STEP_AXIS,
      color: null,
      isSmoothed: false,
      isDashed: true
    }));
  }

  /** The validation losses of a loss, as the mean over ranks. */
  private validationLines(curve: ICurve): IExtraLine[] {
    return this.model.validationCurves(curve).flatMap(({ label, tables, column }, index) => {
      const mean = tables.get(MEAN_RANK);
      const table = mean !== undefined && mean.length > 0 ? mean : [...tables.values()][0];
      return table === undefined
        ? []
        : [
            {
              label: capText(label, MAX_LABEL),
              table,
              column,
              axis: this.axis,
              color: validationColor(index),
              isSmoothed: false,
              isDashed: false
            }
          ];
    });
  }

  private earlierLines(curve: ICurve): IExtraLine[] {
    return this.model.earlier.lines(curve, this.axisName).map(line => ({
      label: capText(line.title, MAX_LABEL),
      table: line.table,
      column: curve.column,
      axis: line.axis,
      color: earlierColor(line.run),
      isSmoothed: true,
      isDashed: true
    }));
  }

  private showReadings(x: number | null, readings: IReading[], marks: readonly IMark[]): void {
    const label = this.curve?.label ?? '';
    setText(this.legendTitle, x === null ? label : `${label} at ${positionText(this.axis, x)}`);
    setText(this.marked, capText(marks.map(markText).join(' · '), MAX_MARKED));
    const isSmall = this.node.classList.contains('accel-nb-is-small');
    const shown = meanFirst(onePerLabel(readings)).slice(0, isSmall ? 1 : MAX_LEGEND);
    while (this.legend.children.length > shown.length) {
      this.legend.lastElementChild?.remove();
    }
    shown.forEach((reading, index) => {
      let item = this.legend.children[index] as HTMLElement | undefined;
      if (item === undefined) {
        item = this.makeItem();
        this.legend.append(item);
      }
      item.dataset.label = reading.label;
      item.setAttribute('aria-pressed', String(!this.hidden.has(reading.label)));
      const [swatch, name, value] = item.children as unknown as HTMLElement[];
      paintSwatch(swatch as HTMLElement, reading.color, reading.isDashed);
      setText(name as HTMLElement, shown.length > 1 ? reading.label : '');
      setText(value as HTMLElement, this.valueText(reading.value));
    });
  }

  private makeItem(): HTMLElement {
    const item = element(
      'button',
      'accel-nb-legend-item',
      element('span', 'accel-nb-swatch'),
      element('span', 'accel-nb-legend-label'),
      element('span', 'accel-nb-legend-value')
    );
    item.type = 'button';
    item.title = 'Show or hide this line';
    item.addEventListener('click', () => this.toggle(item.dataset.label ?? ''), {
      signal: this.signal
    });
    return item;
  }

  private toggle(label: string): void {
    const hidden = new Set(this.hidden);
    if (!hidden.delete(label)) {
      hidden.add(label);
    }
    this.hidden = hidden;
    this.draw(this.curve, this.height);
  }

  private onKey(event: KeyboardEvent): void {
    const move = KEYS[event.key];
    if (move !== undefined && !event.ctrlKey && !event.metaKey && !event.altKey) {
      this.chart.zoomBy(move.factor, move.centre);
      this.node.dataset.pointsDrawn = String(this.chart.numDrawn);
      event.preventDefault();
      event.stopPropagation();
    }
  }

  private valueText(value: number | null): string {
    return this.curve?.unit === 'ms'
      ? formatMilliseconds(value)
      : formatNumber(value, this.chart.numDigits);
  }

  private curve: ICurve | null = null;
  private hidden: ReadonlySet<string> = new Set();
  private height = 0;
  private readonly plot = element('div', 'accel-nb-plot');
  private readonly legendTitle = element('span', 'accel-nb-legend-title');
  private readonly marked = element('span', 'accel-nb-marked');
  private readonly legend = element('span', 'accel-nb-legend-items');
}

/** One reading for each label, with the raw value: a smoothed line has its label and follows its raw values. */
function onePerLabel(readings: readonly IReading[]): IReading[] {
  const found = new Map<string, IReading>();
  for (const reading of readings) {
    const raw = found.get(reading.label);
    found.set(reading.label, raw === undefined ? reading : { ...reading, value: raw.value });
  }
  return [...found.values()];
}

/** The readings with that of the bold line first; it is drawn last. */
function meanFirst(readings: readonly IReading[]): IReading[] {
  return [...readings.slice(-1), ...readings.slice(0, -1)];
}

/** The smoothing of a curve by its length: none up to 500 points, then one of few levels, so that it rarely changes. */
function automaticSmoothing(curve: ICurve): number {
  let numRows = 0;
  for (const table of curve.tables.values()) {
    numRows = Math.max(numRows, table.length);
  }
  if (numRows <= 500 || curve.id.startsWith(LEARNING_RATE)) {
    return 0;
  }
  return numRows <= 5000 ? 0.9 : numRows <= 50_000 ? 0.98 : 0.995;
}
