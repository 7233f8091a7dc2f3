/** The allocator's blocks on each rank at one step, and the objects that use most memory. Hidden until requested. */

import { layOut, type IBorder } from '../chart/blockLayout';
import { capText, formatBytes, formatCount } from '../chart/format';
import { BLOCK_STATES, type IParsedMemorySnapshot } from '../model/memorySnapshot';
import type { PanelModel } from '../model/panelModel';
import { element } from './dom';

const LINES = 6;
const LINE_HEIGHT = 16;
const GAP = 3;
const MAX_NAME = 120;

export class BlockSection {
  constructor(private readonly model: PanelModel) {
    const items = BLOCK_STATES.map((label, state) => {
      const swatch = element('span', 'accel-nb-swatch accel-nb-is-square accel-nb-block');
      swatch.dataset.state = String(state);
      return element('span', 'accel-nb-legend-item', swatch, label);
    });
    this.node = element(
      'div',
      'accel-nb-blocks',
      element(
        'div',
        'accel-nb-legend',
        element('span', 'accel-nb-legend-title', 'memory blocks'),
        element('span', 'accel-nb-legend-items', ...items)
      ),
      this.list
    );
    this.node.hidden = true;
  }

  readonly node: HTMLElement;

  update(): void {
    const { memorySnapshots } = this.model;
    if (memorySnapshots === this.drawn) {
      return;
    }
    this.drawn = memorySnapshots;
    this.node.hidden = memorySnapshots.length === 0;
    this.list.replaceChildren(...memorySnapshots.map(drawSnapshot));
  }

  private drawn: readonly IParsedMemorySnapshot[] = [];
  private readonly list = element('div', 'accel-nb-blocks-list');
}

function drawSnapshot(snapshot: IParsedMemorySnapshot): HTMLElement {
  const left = snapshot.numSegments - snapshot.segments.length;
  const figures = [
    `${formatBytes(snapshot.inUse)} of ${formatBytes(snapshot.reserved)} in use`,
    `${formatCount(snapshot.numSegments)} ${snapshot.numSegments === 1 ? 'segment' : 'segments'}`,
    `largest free ${formatBytes(snapshot.largestFree)}`,
    ...(left > 0 ? [`${formatCount(left)} smaller not drawn`] : [])
  ].join(' · ');
  const shown = element('span', 'accel-nb-map-text', figures);
  shown.title = figures;
  const caption = element(
    'div',
    'accel-nb-map-caption',
    element(
      'span',
      'accel-nb-map-name',
      `rank ${snapshot.rank}, after step ${formatCount(snapshot.step)}`
    ),
    shown
  );
  const holders = element('div', 'accel-nb-holders', ...drawHolders(snapshot));
  return element(
    'div',
    'accel-nb-block-row',
    element('div', 'accel-nb-block-map', caption, drawBlocks(snapshot, figures)),
    holders
  );
}

function drawBlocks(snapshot: IParsedMemorySnapshot, figures: string): HTMLElement {
  const { pieces, borders } = layOut(snapshot, LINES);
  const drawing = element('div', 'accel-nb-block-drawing');
  drawing.style.height = `${LINES * (LINE_HEIGHT + GAP) - GAP}px`;
  drawing.setAttribute('role', 'img');
  drawing.setAttribute('aria-label', `Memory blocks of rank ${snapshot.rank}: ${figures}`);
  for (const piece of pieces) {
    const block = snapshot.blocks[piece.block]!;
    const drawn = place(element('div', 'accel-nb-block'), piece);
    drawn.style.width = percent(piece.width);
    drawn.dataset.state = String(block.state);
    drawn.title =
      `${formatBytes(block.size)} ${BLOCK_STATES[block.state] ?? ''}, in segment ` +
      `${block.segment + 1} of ${formatBytes(snapshot.segments[block.segment] ?? null)}`;
    drawing.append(drawn);
  }
  drawing.append(...borders.map(border => place(element('div', 'accel-nb-border'), border)));
  return drawing;
}

/** Position an element on its line of the drawing. */
function place(target: HTMLElement, { line, left }: IBorder): HTMLElement {
  target.style.left = percent(left);
  target.style.top = `${line * (LINE_HEIGHT + GAP)}px`;
  target.style.height = `${LINE_HEIGHT}px`;
  return target;
}

function drawHolders(snapshot: IParsedMemorySnapshot): HTMLElement[] {
  const most = Math.max(...snapshot.holders.map(holder => holder.size), 1);
  return snapshot.holders.map(({ name, size }) => {
    const fill = element('span', 'accel-nb-holder-fill');
    fill.style.width = `${Math.round((100 * size) / most)}%`;
    const label = element('span', 'accel-nb-holder-name', capText(name, MAX_NAME));
    return element(
      'div',
      'accel-nb-holder',
      label,
      element('span', 'accel-nb-holder-size', formatBytes(size)),
      element('span', 'accel-nb-holder-bar', fill)
    );
  });
}

function percent(share: number): string {
  return `${Number((100 * share).toFixed(3))}%`;
}
