/** The memory maps of the ranks, on common scales. */

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

/** Maximum number of ranks whose map is drawn. */
const MAX_MEMORY_MAPS = 8;

const CAPTION_HEIGHT = 20;
const MIN_MAP_HEIGHT = 70;
const TIME_AXIS_HEIGHT = 22;

/** Minimum width of a map, in pixels; maps are side by side if the section is wide enough. */
const MIN_MAP_WIDTH = 220;
/** Maximum number of maps in a column beside the chart; more are drawn below it. */
const MAX_BESIDE = 3;

interface IMap {
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
    this.mapButton = actionButton(
      'blocks',
      'Map the allocator’s blocks after this step, and the variables that use them',
      () => send({ kind: 'map_memory' }),
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
        this.mapButton,
        element('span', 'accel-nb-legend-items', ...this.items)
      ),
      this.list,
      this.more
    );
  }

  readonly node: HTMLElement;

  setTheme(theme: ITheme): void {
    this.theme = theme;
    for (const map of this.maps.values()) {
      map.chart.setTheme(theme);
    }
  }

  /** Whether the maps fit into a column beside the chart. */
  get fitsBeside(): boolean {
    return this.model.memory.size <= MAX_BESIDE;
  }

  /** Draw every map; beside the chart, in a column of about `height` pixels. */
  draw(height: number, isBeside: boolean): void {
    const ranks = [...this.model.memory.keys()].sort((a, b) => a - b);
    const shown = ranks.slice(0, MAX_MEMORY_MAPS);
    this.node.hidden = shown.length === 0;
    this.mapButton.hidden = !hasAllocator(this.model.facts);
    this.updateMaps(shown);
    setText(
      this.more,
      ranks.length > shown.length ? `${shown.length} of ${ranks.length} ranks drawn` : ''
    );
    const maps = shown.map(rank => this.maps.get(rank)!);
    this.items.forEach((item, index) => {
      // A category that has had bytes keeps its entry: its values are not read again.
      item.hidden = item.hidden && !maps.some(map => map.chart.has(index));
    });
    const top = Math.max(...maps.map(map => map.chart.peak()), 1);
    const end = Math.max(...maps.map(map => lastTime(map.table)), 1e-3);
    const each = (height - TIME_AXIS_HEIGHT) / Math.max(1, shown.length) - CAPTION_HEIGHT;
    const plotHeight = isBeside ? Math.max(MIN_MAP_HEIGHT, Math.floor(each)) : MIN_MAP_HEIGHT;
    const columns = isBeside ? 1 : numColumns(maps.length, this.node.clientWidth);
    this.list.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    const lastRow = Math.floor((maps.length - 1) / columns);
    maps.forEach((map, index) => {
      const hasTimeAxis = Math.floor(index / columns) === lastRow;
      map.chart.resize(map.plot.clientWidth, plotHeight + (hasTimeAxis ? TIME_AXIS_HEIGHT : 0));
      map.chart.draw(top, end, hasTimeAxis);
    });
  }

  dispose(): void {
    for (const map of this.maps.values()) {
      map.chart.dispose();
    }
  }

  private updateMaps(ranks: readonly number[]): void {
    for (const [rank, map] of this.maps) {
      if (!ranks.includes(rank) || this.model.memory.get(rank) !== map.table) {
        map.chart.dispose();
        map.node.remove();
        this.maps.delete(rank);
      }
    }
    for (const rank of ranks) {
      const map = this.maps.get(rank) ?? this.makeMap(rank);
      const facts = this.model.facts?.ranks.find(known => known.rank === rank);
      const parts = [rankName({ rank, place: facts?.place ?? '' }), facts?.device ?? ''];
      setText(map.caption, parts.filter(part => part !== '').join(' · '));
      const growth = facts?.processGrowth ?? null;
      setText(map.growth, growth === null ? '' : `process +${formatBytes(growth)}`);
    }
  }

  private makeMap(rank: number): IMap {
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
    const map = { table, node, plot, caption, figures, growth, chart };
    this.maps.set(rank, map);
    this.list.append(node);
    return map;
  }

  private readonly mapButton: HTMLButtonElement;
  private readonly items: readonly HTMLElement[];
  private readonly maps = new Map<number, IMap>();
  private readonly list = element('div', 'accel-nb-maps');
  private readonly more = element('div', 'accel-nb-more');
}

/** Return the number of columns that fit into `width` pixels, reduced so that rows are about equally long. */
export function numColumns(numMaps: number, width: number): number {
  const most = Math.max(1, Math.floor(width / MIN_MAP_WIDTH));
  const numRows = Math.max(1, Math.ceil(numMaps / most));
  return Math.max(1, Math.ceil(numMaps / numRows));
}

/** Whether memory blocks can be mapped: a rank has a CUDA device, and the running cell receives actions. */
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
