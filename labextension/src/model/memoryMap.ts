/** Maps of a rank's device memory: the allocator's segments and blocks at one moment, with every field checked. */

import type { IMemoryMapped } from '../generated/messages';
import { asCount, asList, asRank, asRecord, asText, ProtocolError, type Checked } from './checks';

const MAX_MAPS = 8;
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

export interface IMapBlock {
  readonly segment: number;
  readonly offset: number;
  readonly size: number;
  readonly state: number;
}

/** Sizes in bytes. */
export interface IMemoryMap extends Omit<
  Checked<IMemoryMapped>,
  'kind' | 'time' | 'blocks' | 'holders' | 'held'
> {
  readonly blocks: readonly IMapBlock[];
  readonly holders: readonly { readonly name: string; readonly size: number }[];
}

export function parseMaps(value: unknown): IMemoryMap[] {
  return asList(value, 'maps', MAX_MAPS).map(parseMap);
}

function parseMap(value: unknown): IMemoryMap {
  const map = asRecord<IMemoryMapped>(value, 'map');
  const segments = asCounts(map.segments, 'segments', MAX_SEGMENTS);
  const numbers = asCounts(map.blocks, 'blocks', 4 * MAX_BLOCKS);
  const blocks: IMapBlock[] = [];
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
  const sizes = asCounts(map.held, 'held', MAX_HOLDERS);
  const holders = asList(map.holders, 'holders', MAX_HOLDERS).map((name, index) => ({
    name: asText(name),
    size: sizes[index] ?? 0
  }));
  return {
    rank: asRank(map.rank),
    step: asCount(map.step, 'step'),
    numSegments: asCount(map.num_segments, 'num_segments'),
    reserved: asCount(map.reserved, 'reserved'),
    inUse: asCount(map.in_use, 'in_use'),
    largestFree: asCount(map.largest_free, 'largest_free'),
    segments,
    blocks,
    holders
  };
}

function asCounts(value: unknown, what: string, limit: number): number[] {
  return asList(value, what, limit).map(item => asCount(item, what));
}
