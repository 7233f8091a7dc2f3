/** Where the blocks of a memory map go: one strip of all segments, broken into lines as a text is. */

import type { IMemoryMap } from '../model/memoryMap';

/** Where something begins; `left` is a share of the line. */
export interface IBorder {
  readonly line: number;
  readonly left: number;
}

/** A piece of a block on one line; `width` is a share of the line too. */
export interface IPiece extends IBorder {
  readonly block: number;
  readonly width: number;
}

/** A byte takes the same room wherever it is. */
export function layOut(
  map: Pick<IMemoryMap, 'segments' | 'blocks'>,
  numLines: number
): { pieces: IPiece[]; borders: IBorder[] } {
  const starts: number[] = [];
  let total = 0;
  for (const size of map.segments) {
    starts.push(total);
    total += size;
  }
  const perLine = Math.max(1, Math.ceil(total / Math.max(1, numLines)));
  const pieces: IPiece[] = [];
  map.blocks.forEach(({ segment, offset, size }, block) => {
    let from = (starts[segment] ?? 0) + offset;
    const end = from + size;
    while (from < end) {
      const line = Math.floor(from / perLine);
      const to = Math.min(end, (line + 1) * perLine);
      pieces.push({
        block,
        line,
        left: (from - line * perLine) / perLine,
        width: (to - from) / perLine
      });
      from = to;
    }
  });
  const borders = starts.slice(1).map(start => {
    const line = Math.floor(start / perLine);
    return { line, left: (start - line * perLine) / perLine };
  });
  return { pieces, borders };
}
