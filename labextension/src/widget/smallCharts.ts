/** Small charts, side by side, of the curves that are not in the main chart. */

import type { ITheme } from '../chart/theme';
import type { AxisName } from '../model/earlierRuns';
import { LEARNING_RATE, type ICurve, type PanelModel } from '../model/panelModel';
import { CurveSection } from './curveSection';
import { element } from './dom';

const HEIGHT = 132;

/** Maximum number of small charts; the drop-down list has all curves. */
const MAX_CHARTS = 12;

/** The number of newest rows that are examined to decide whether a curve varies, or spans decades. */
const NUM_EXAMINED_ROWS = 4096;

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
    shown.forEach((curve, index) => {
      let section = this.sections.get(curve.id);
      if (section === undefined) {
        section = new CurveSection(this.model, this.theme, this.signal, this.cursor);
        section.smoothing = this.smoothing;
        section.axisName = this.axisName;
        section.node.classList.add('accel-nb-is-small');
        this.sections.set(curve.id, section);
      }
      // A chart that is moved loses the keyboard's focus.
      const there = this.node.children[index] ?? null;
      if (there !== section.node) {
        this.node.insertBefore(section.node, there);
      }
      section.draw(curve, HEIGHT);
    });
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

/** Whether a curve is worth a chart: a constant learning rate is not. */
export function isVarying(curve: ICurve): boolean {
  if (!curve.id.startsWith(LEARNING_RATE)) {
    return true;
  }
  return newestValues(curve).some((value, _row, values) => value !== values[0]);
}

/** Whether all values are positive, and the largest is at least a hundred times the smallest. */
export function spansDecades(curve: ICurve): boolean {
  const values = newestValues(curve).filter(Number.isFinite);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return low > 0 && high >= 100 * low;
}

function newestValues(curve: ICurve): Float64Array {
  const [table] = curve.tables.values();
  return table?.column(curve.column).subarray(-NUM_EXAMINED_ROWS) ?? new Float64Array(0);
}
