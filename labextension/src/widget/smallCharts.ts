/** The curves that are not drawn large: one small chart each, side by side. */

import type { ITheme } from '../chart/theme';
import type { AxisName } from '../model/earlierRuns';
import { LEARNING_RATE, type ICurve, type PanelModel } from '../model/panelModel';
import { CurveSection } from './curveSection';
import { element } from './dom';

const HEIGHT = 132;

/** More charts than these are not drawn: the chooser has all curves. */
const MAX_CHARTS = 12;

/** So many of the newest rows decide whether a curve varies. */
const MAX_LOOKED_AT = 4096;

export class SmallCharts {
  constructor(
    private readonly model: PanelModel,
    private theme: ITheme,
    private readonly signal: AbortSignal,
    private readonly cursor: string
  ) {}

  readonly node = element('div', 'accel-nb-small-charts');

  draw(curves: readonly ICurve[]): void {
    const shown = curves.slice(0, MAX_CHARTS);
    for (const [id, section] of [...this.sections]) {
      if (!shown.some(curve => curve.id === id)) {
        section.chart.dispose();
        section.node.remove();
        this.sections.delete(id);
      }
    }
    for (const curve of shown) {
      let section = this.sections.get(curve.id);
      if (section === undefined) {
        section = new CurveSection(this.model, this.theme, this.signal, this.cursor);
        section.smoothing = this.smoothing;
        section.axisName = this.axisName;
        section.node.classList.add('accel-nb-is-small');
        this.sections.set(curve.id, section);
      }
      this.node.append(section.node); // in the order of the curves
      section.draw(curve, HEIGHT);
    }
  }

  setSmoothing(weight: number | null): void {
    this.smoothing = weight;
    this.sections.forEach(section => (section.smoothing = weight));
  }

  setAxis(name: AxisName): void {
    this.axisName = name;
    this.sections.forEach(section => (section.axisName = name));
  }

  setTheme(theme: ITheme): void {
    this.theme = theme;
    this.sections.forEach(section => section.chart.setTheme(theme));
  }

  dispose(): void {
    this.sections.forEach(section => section.chart.dispose());
  }

  private readonly sections = new Map<string, CurveSection>();
  private smoothing: number | null = null;
  private axisName: AxisName = 'step';
}

/** A learning rate that never changes is a figure, no chart. */
export function varies(curve: ICurve): boolean {
  if (!curve.id.startsWith(LEARNING_RATE)) {
    return true;
  }
  return newest(curve).some((value, _row, values) => value !== values[0]);
}

/** Whether the largest value is a hundred times the smallest one and more, and all are positive. */
export function spansDecades(curve: ICurve): boolean {
  const values = newest(curve).filter(Number.isFinite);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return low > 0 && high >= 100 * low;
}

function newest(curve: ICurve): Float64Array {
  const [table] = curve.tables.values();
  return table?.column(curve.column).subarray(-MAX_LOOKED_AT) ?? new Float64Array(0);
}
