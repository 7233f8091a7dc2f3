/** The chart over steps with its legend. */

import { CurveChart, type IReading } from '../chart/curveChart';
import { formatCount, formatMilliseconds, formatNumber } from '../chart/format';
import type { ITheme } from '../chart/theme';
import type { ICurve, PanelModel } from '../model/panelModel';
import { MEAN_RANK } from '../model/protocol';
import { element, setText } from './dom';

/** More readings than these do not fit above the chart. */
const MAX_LEGEND = 9;

export class CurveSection {
  constructor(
    private readonly model: PanelModel,
    theme: ITheme
  ) {
    this.chart = new CurveChart(this.plot, theme, (x, readings) => this.showReadings(x, readings));
    this.node = element(
      'div',
      'accel-nb-section',
      element('div', 'accel-nb-legend', this.legendTitle, this.legend),
      this.plot
    );
  }

  readonly node: HTMLElement;
  readonly chart: CurveChart;

  draw(curve: ICurve | null, height: number): void {
    if (curve === null) {
      return;
    }
    this.curve = curve;
    this.chart.resize(this.plot.clientWidth, height);
    this.chart.draw({
      label: curve.label,
      tables: curve.tables,
      column: curve.column,
      meanRank: MEAN_RANK,
      marks: this.model.marks
    });
    this.node.dataset.pointsDrawn = String(this.chart.numDrawn);
  }

  private showReadings(x: number | null, readings: IReading[]): void {
    const label = this.curve?.label ?? '';
    setText(this.legendTitle, x === null ? label : `${label} at step ${formatCount(x)}`);
    const shown = meanFirst(readings).slice(0, MAX_LEGEND);
    while (this.legend.children.length > shown.length) {
      this.legend.lastElementChild?.remove();
    }
    shown.forEach((reading, index) => {
      let item = this.legend.children[index] as HTMLElement | undefined;
      if (item === undefined) {
        item = element(
          'span',
          'accel-nb-legend-item',
          element('span', 'accel-nb-swatch'),
          element('span', 'accel-nb-legend-label'),
          element('span', 'accel-nb-legend-value')
        );
        this.legend.append(item);
      }
      const [swatch, name, value] = item.children as unknown as HTMLElement[];
      (swatch as HTMLElement).style.background = reading.colour;
      setText(name as HTMLElement, readings.length > 1 ? reading.label : '');
      setText(value as HTMLElement, this.valueText(reading.value));
    });
  }

  private valueText(value: number | null): string {
    return this.curve?.unit === 'ms' ? formatMilliseconds(value) : formatNumber(value);
  }

  private curve: ICurve | null = null;
  private readonly plot = element('div', 'accel-nb-plot');
  private readonly legendTitle = element('span', 'accel-nb-legend-title');
  private readonly legend = element('span', 'accel-nb-legend-items');
}

/** The bold line is drawn last and read first. */
function meanFirst(readings: readonly IReading[]): IReading[] {
  return [...readings.slice(-1), ...readings.slice(0, -1)];
}
