/** The memory charts of the ranks, on common scales. */

import type { ColumnTable } from '../chart/columns';
import { formatBytes } from '../chart/format';
import { MemoryChart, type IMemoryReading } from '../chart/memoryChart';
import { MEMORY_CATEGORIES } from '../chart/palette';
import type { ITheme } from '../chart/theme';
import type { PanelModel } from '../model/panelModel';
import type { IFacts } from '../model/protocol';
import { actionButton, element, paintSwatch, setText } from './dom';
import { rankName } from './header';
import type { Action } from './runControls';

/** Maximum number of ranks whose chart is drawn. */
const MAX_MEMORY_MAPS = 8;

const CAPTION_HEIGHT = 20;
const MIN_MAP_HEIGHT = 70;
const TIME_AXIS_HEIGHT = 22;

/** Minimum width of a chart, in pixels; charts are side by side if the section is wide enough. */
const MIN_MAP_WIDTH = 220;
/** Maximum number of charts in a column beside the chart; more are drawn below it. */
const MAX_BESIDE = 3;

interface IRankChart {
  readonly table: ColumnTable;
  readonly node: HTMLElement;
  readonly plot: HTMLElement;
  readonly caption: HTMLElement;
  readonly figures: HTMLElement;
  readonly growth: HTMLElement;
  readonly chart: MemoryChart;
}

export class MemorySection {
  constructor(
    private readonly model: PanelModel,
    private theme: ITheme,
    send: (action: Action) => void,
    signal: AbortSignal
  ) {
    this.snapshotButton = actionButton(
      'blocks',
      'Show the allocator’s blocks after this step, and the variables that use them',
      () => send({ kind: 'memory_snapshot' }),
      signal
    );
    this.items = MEMORY_CATEGORIES.map(category => {
      const swatch = element('span', 'accel-nb-swatch accel-nb-is-square');
      paintSwatch(swatch, category.color, false);
      const label = element('span', 'accel-nb-legend-label', category.label);
      const item = element('span', 'accel-nb-legend-item', swatch, label);
      item.hidden = true;
      return item;
    });
    this.node = element(
      'div',
      'accel-nb-section',
      element(
        'div',
        'accel-nb-legend accel-nb-is-compact',
        element('span', 'accel-nb-legend-title', 'memory'),
        this.snapshotButton,
        element('span', 'accel-nb-legend-items', ...this.items)
      ),
      this.list,
      this.more
    );
  }

  readonly node: HTMLElement;

  setTheme(theme: ITheme): void {
    this.theme = theme;
    for (const rankChart of this.rankCharts.values()) {
      rankChart.chart.setTheme(theme);
    }
  }

  /** Whether the charts fit into a column beside the chart. */
  get fitsBeside(): boolean {
    return this.model.memory.size <= MAX_BESIDE;
  }

  /** Draw every chart; beside the chart of curves, in a column of about `height` pixels. */
  draw(height: number, isBeside: boolean): void {
    const ranks = [...this.model.memory.keys()].sort((a, b) => a - b);
    const shown = ranks.slice(0, MAX_MEMORY_MAPS);
    this.node.hidden = shown.length === 0;
    this.snapshotButton.hidden = !hasAllocator(this.model.facts);
    this.updateRankCharts(shown);
    setText(
      this.more,
      ranks.length > shown.length ? `${shown.length} of ${ranks.length} ranks drawn` : ''
    );
    const charts = shown.map(rank => this.rankCharts.get(rank)!);
    this.items.forEach((item, index) => {
      // A category that has had bytes keeps its entry: its values are not read again.
      item.hidden = item.hidden && !charts.some(rankChart => rankChart.chart.has(index));
    });
    const top = Math.max(...charts.map(rankChart => rankChart.chart.peak()), 1);
    const end = Math.max(...charts.map(rankChart => lastTime(rankChart.table)), 1e-3);
    const each = (height - TIME_AXIS_HEIGHT) / Math.max(1, shown.length) - CAPTION_HEIGHT;
    const plotHeight = isBeside ? Math.max(MIN_MAP_HEIGHT, Math.floor(each)) : MIN_MAP_HEIGHT;
    const columns = isBeside ? 1 : numColumns(charts.length, this.node.clientWidth);
    this.list.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    const lastRow = Math.floor((charts.length - 1) / columns);
    charts.forEach((rankChart, index) => {
      const hasTimeAxis = Math.floor(index / columns) === lastRow;
      rankChart.chart.resize(
        rankChart.plot.clientWidth,
        plotHeight + (hasTimeAxis ? TIME_AXIS_HEIGHT : 0)
      );
      rankChart.chart.draw(top, end, hasTimeAxis);
    });
  }

  dispose(): void {
    for (const rankChart of this.rankCharts.values()) {
      rankChart.chart.dispose();
    }
  }

  private updateRankCharts(ranks: readonly number[]): void {
    for (const [rank, rankChart] of this.rankCharts) {
      if (!ranks.includes(rank) || this.model.memory.get(rank) !== rankChart.table) {
        rankChart.chart.dispose();
        rankChart.node.remove();
        this.rankCharts.delete(rank);
      }
    }
    for (const rank of ranks) {
      const rankChart = this.rankCharts.get(rank) ?? this.makeRankChart(rank);
      const facts = this.model.facts?.ranks.find(known => known.rank === rank);
      const parts = [rankName({ rank, place: facts?.place ?? '' }), facts?.device ?? ''];
      setText(rankChart.caption, parts.filter(part => part !== '').join(' · '));
      const growth = facts?.processGrowth ?? null;
      setText(rankChart.growth, growth === null ? '' : `process +${formatBytes(growth)}`);
    }
  }

  private makeRankChart(rank: number): IRankChart {
    const table = this.model.memory.get(rank)!;
    const plot = element('div', 'accel-nb-plot');
    const caption = element('span', 'accel-nb-map-name');
    const growth = element('span', 'accel-nb-map-figure');
    growth.title = 'Growth of the whole process since the first step';
    const figures = element(
      'span',
      'accel-nb-map-figures',
      ...['', '', ''].map(() => element('span', 'accel-nb-map-figure')),
      growth
    );
    const node = element(
      'div',
      'accel-nb-map',
      element('div', 'accel-nb-map-caption', caption, figures),
      plot
    );
    const chart = new MemoryChart(plot, this.theme, table, reading =>
      showReading(figures, reading)
    );
    const rankChart = { table, node, plot, caption, figures, growth, chart };
    this.rankCharts.set(rank, rankChart);
    this.list.append(node);
    return rankChart;
  }

  private readonly snapshotButton: HTMLButtonElement;
  private readonly items: readonly HTMLElement[];
  private readonly rankCharts = new Map<number, IRankChart>();
  private readonly list = element('div', 'accel-nb-maps');
  private readonly more = element('div', 'accel-nb-more');
}

/** Return the number of columns that fit into `width` pixels, reduced so that rows are about equally long. */
export function numColumns(numMaps: number, width: number): number {
  const most = Math.max(1, Math.floor(width / MIN_MAP_WIDTH));
  const numRows = Math.max(1, Math.ceil(numMaps / most));
  return Math.max(1, Math.ceil(numMaps / numRows));
}

/** Whether memory blocks can be reported: a rank has a CUDA device, and the running cell receives actions. */
function hasAllocator(facts: IFacts | null): boolean {
  return (
    facts !== null &&
    facts.status === 'running' &&
    facts.acceptsActions &&
    facts.ranks.some(rank => rank.device.startsWith('cuda'))
  );
}

function lastTime(table: ColumnTable): number {
  return table.length > 0 ? (table.column(0)[table.length - 1] ?? 0) : 0;
}

function showReading(target: HTMLElement, reading: IMemoryReading | null): void {
  if (reading === null) {
    return;
  }
  const free = reading.free > 0 ? `free ${formatBytes(reading.free)}` : '';
  const figures = [formatBytes(reading.total), `peak ${formatBytes(reading.peak)}`, free];
  // A figure that does not fit wraps into a hidden line; the title contains it too.
  figures.forEach((figure, index) => {
    setText(target.children[index] as HTMLElement, figure);
  });
  const parts = MEMORY_CATEGORIES.map(
    (category, index) => `${category.label}: ${formatBytes(reading.values[index] ?? null)}`
  );
  target.title = [...parts, ...figures.slice(1).filter(Boolean)].join('\n');
}
