/** Memory snapshots: the segments and blocks of the allocator of a rank's device, with every field checked. */

import type { IMemorySnapshot } from '../generated/messages';
import { asCount, asList, asRank, asRecord, asText, ProtocolError, type Checked } from './checks';

const MAX_SNAPSHOTS = 8;
const MAX_SEGMENTS = 64;
const MAX_BLOCKS = 512;
const MAX_HOLDERS = 16;

/** Labels of the block states, by their numbers in `accel_nb/telemetry/allocator_blocks.py`. */
export const BLOCK_STATES = [
  'in use',
  'freed, used by a stream',
  'free',
  'small blocks, mixed'
] as const;

export interface IBlock {
  readonly segment: number;
  readonly offset: number;
  readonly size: number;
  readonly state: number;
}

/** Sizes in bytes. */
export interface IParsedMemorySnapshot extends Omit<
  Checked<IMemorySnapshot>,
  'kind' | 'time' | 'blocks' | 'holders' | 'holderBytes'
> {
  readonly blocks: readonly IBlock[];
  readonly holders: readonly { readonly name: string; readonly size: number }[];
}

export function parseMemorySnapshots(value: unknown): IParsedMemorySnapshot[] {
  return asList(value, 'memory_snapshots', MAX_SNAPSHOTS).map(parseMemorySnapshot);
}

function parseMemorySnapshot(value: unknown): IParsedMemorySnapshot {
  const snapshot = asRecord<IMemorySnapshot>(value, 'snapshot');
  const segments = asCounts(snapshot.segments, 'segments', MAX_SEGMENTS);
  const numbers = asCounts(snapshot.blocks, 'blocks', 4 * MAX_BLOCKS);
  const blocks: IBlock[] = [];
  for (let start = 0; start < numbers.length; start += 4) {
    const [segment, offset, size, state] = numbers.slice(start, start + 4) as [
      number,
      number,
      number,
      number
    ];
    const segmentSize = segments[segment];
    if (
      segmentSize === undefined ||
      !(offset + size <= segmentSize) ||
      !(state < BLOCK_STATES.length)
    ) {
      throw new ProtocolError('a block that is in no segment');
    }
    blocks.push({ segment, offset, size, state });
  }
  const sizes = asCounts(snapshot.holder_bytes, 'holder_bytes', MAX_HOLDERS);
  const holders = asList(snapshot.holders, 'holders', MAX_HOLDERS).map((name, index) => ({
    name: asText(name),
    size: sizes[index] ?? 0
  }));
  return {
    rank: asRank(snapshot.rank),
    step: asCount(snapshot.step, 'step'),
    numSegments: asCount(snapshot.num_segments, 'num_segments'),
    reserved: asCount(snapshot.reserved, 'reserved'),
    inUse: asCount(snapshot.in_use, 'in_use'),
    largestFree: asCount(snapshot.largest_free, 'largest_free'),
    segments,
    blocks,
    holders
  };
}

function asCounts(value: unknown, what: string, limit: number): number[] {
  return asList(value, what, limit).map(item => asCount(item, what));
}
