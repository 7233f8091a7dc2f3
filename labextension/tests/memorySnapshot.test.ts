import { describe, expect, it } from 'vitest';
import { layOut } from '../src/chart/blockLayout';
import { PanelModel } from '../src/model/panelModel';
import { parseMessage, ProtocolError } from '../src/model/protocol';
import { BlockSection } from '../src/widget/blockSection';
import { numColumns } from '../src/widget/memorySection';
import { stepMessage } from './messages';

const MIB = 2 ** 20;
const HOSTILE = '<img src=x onerror=alert(1)>';

const MAP = {
  rank: 0,
  step: 7,
  num_segments: 3,
  reserved: 22 * MIB,
  in_use: 6 * MIB,
  largest_free: 10 * MIB,
  segments: [16 * MIB, 4 * MIB],
  blocks: [0, 0, 6 * MIB, 0, 0, 6 * MIB, 10 * MIB, 2, 1, 0, 4 * MIB, 3],
  holders: ['`losses (line 3)`', HOSTILE],
  holder_bytes: [3 * MIB, MIB]
};

function message(base: number, extra: Record<string, unknown>) {
  const { content, buffer } = stepMessage(base, [], extra);
  return parseMessage(content, [buffer]);
}

describe('a map of memory', () => {
  it('draws all bytes in the same scale, over line breaks and segments', () => {
    const { memorySnapshots } = message(0, { memory_snapshots: [MAP] });
    const { pieces, borders } = layOut(memorySnapshots![0]!, 4);
    const room = [0, 1, 2].map(block =>
      pieces.filter(piece => piece.block === block).reduce((sum, piece) => sum + piece.width, 0)
    );
    expect(room.map(width => Math.round(width * 100))).toEqual([120, 200, 80]); // of lines of 5 MiB
    expect(pieces.every(({ left, width }) => left >= 0 && left + width <= 1 + 1e-9)).toBe(true);
    expect(Math.max(...pieces.map(piece => piece.line))).toBe(3);
    expect(borders).toEqual([{ line: 3, left: 0.2 }]);
    expect(layOut({ segments: [], blocks: [] }, 4)).toEqual({ pieces: [], borders: [] });
  });

  it('is absent before the first message, and shows names as text', () => {
    const model = new PanelModel();
    const section = new BlockSection(model);
    model.apply(message(0, {}));
    section.update();
    expect(section.node.hidden).toBe(true);
    model.apply(message(1, { memory_snapshots: [MAP] }));
    section.update();
    expect(section.node.hidden).toBe(false);
    expect(section.node.querySelector('img')).toBeNull();
    expect(section.node.textContent).toContain(HOSTILE);
    expect(section.node.textContent).toContain('rank 0, after step 7');
    expect(section.node.textContent).toContain('6 MiB of 22 MiB in use · 3 segments · largest free 10 MiB');
    expect(section.node.textContent).toContain('1 smaller not drawn');
    const drawn = [
      ...section.node.querySelectorAll<HTMLElement>('.accel-nb-block-drawing > .accel-nb-block')
    ];
    expect(new Set(drawn.map(block => block.dataset.state))).toEqual(new Set(['0', '2', '3']));
    expect(drawn[0]!.title).toBe('6 MiB in use, in segment 1 of 16 MiB');
    model.apply(message(2, {}));
    section.update();
    expect(section.node.hidden).toBe(false); // a message without snapshots leaves them
    model.apply(message(3, { kind: 'snapshot' }));
    section.update();
    expect(section.node.hidden).toBe(true);
  });

  it.each([
    ['a block in no segment', { blocks: [2, 0, 1, 0] }],
    ['a block beyond its segment', { blocks: [1, 3 * MIB, 2 * MIB, 0] }],
    ['a state of its own', { blocks: [0, 0, 1, 4] }],
    ['half a block', { blocks: [0, 0, 1] }],
    ['too many blocks', { blocks: new Array<number>(4 * 513).fill(0) }],
    ['too many segments', { segments: new Array<number>(65).fill(1) }],
    ['a negative size', { reserved: -1 }],
    ['texts for numbers', { segments: ['1'] }],
    ['too many holders', { holders: new Array<string>(17).fill('x') }]
  ])('refuses %s', (_, change) => {
    expect(() => message(0, { memory_snapshots: [{ ...MAP, ...change }] })).toThrow(ProtocolError);
  });

  it('refuses more ranks than can be drawn', () => {
    expect(() => message(0, { memory_snapshots: new Array<object>(9).fill(MAP) })).toThrow(ProtocolError);
  });
});

describe('memory charts of many ranks', () => {
  it.each([
    [8, 970, 4],
    [5, 970, 3],
    [3, 970, 3],
    [4, 500, 2],
    [4, 100, 1],
    [0, 970, 1]
  ])('%i in %i pixels stand in %i columns', (numMaps, width, columns) => {
    expect(numColumns(numMaps, width)).toBe(columns);
  });
});
