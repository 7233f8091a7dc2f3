/** Layout of the blocks of a memory snapshot: one strip of all segments, wrapped into lines of equal length. */

import type { IParsedMemorySnapshot } from '../model/memorySnapshot';

/** The start of a segment or of a piece; `left` is a fraction of the line. */
export interface IBorder {
  readonly line: number;
  readonly left: number;
}

/** The part of a block on one line; `width` is a fraction of the line. */
export interface IPiece extends IBorder {
  readonly block: number;
  readonly width: number;
}

/** Compute the pieces of all blocks, and the borders between segments; every byte has the same width. */
export function layOut(
  snapshot: Pick<IParsedMemorySnapshot, 'segments' | 'blocks'>,
  numLines: number
): { pieces: IPiece[]; borders: IBorder[] } {
  const starts: number[] = [];
  let total = 0;
  for (const size of snapshot.segments) {
    starts.push(total);
    total += size;
  }
  const perLine = Math.max(1, Math.ceil(total / Math.max(1, numLines)));
  const pieces: IPiece[] = [];
  snapshot.blocks.forEach(({ segment, offset, size }, block) => {
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
