/**
 * What the kernel tells a panel, checked field by field: a message may come from a forged notebook.
 *
 * A message is JSON beside one buffer of little-endian float64: the blocks' rows, block after block, column after column.
 */

import { isMarkKind, type IMark } from '../chart/palette';
import {
  asCount,
  asList,
  asNumber,
  asRank,
  asRecord,
  asText,
  MAX_RANKS,
  ProtocolError
} from './checks';
import { parseMaps, type IMemoryMap } from './memoryMap';

export const PROTOCOL_VERSION = 1;

export { MAX_RANKS, MEAN_RANK, ProtocolError } from './checks';

const MAX_BLOCKS = 8192;
const MAX_BLOCK_ROWS = 1 << 22;
const MAX_MARKS = 200;
const MAX_METRICS = 32;
const MAX_NOTES = 16;

/** The columns of each table; the first is x, `memory` ends with the total. */
export const TABLE_COLUMNS = {
  step: ['step', 'loss', 'learning rate', 'step time', 'samples', 'time'],
  metric: ['step', 'value'],
  memory: ['time', 'parameters', 'gradients', 'optimizer', 'other', 'cached', 'free', 'total'],
  plan: ['step', 'learning rate']
} as const;

export type TableKind = keyof typeof TABLE_COLUMNS;

export type RunStatus = 'running' | 'done' | 'failed' | 'interrupted';

export interface IBlock {
  readonly table: TableKind;
  readonly rank: number;
  readonly name: string;
  readonly numRows: number;
  readonly values: Float64Array;
}

export interface IRankFacts {
  readonly rank: number;
  readonly device: string;
  readonly stepMs: number | null;
  readonly isStraggler: boolean;
}

export interface IFacts {
  readonly title: string;
  readonly status: RunStatus;
  readonly numWorkers: number;
  readonly step: number;
  readonly loss: number | null;
  readonly learningRate: number | null;
  readonly samplesPerS: number | null;
  readonly stepMs: number | null;
  readonly elapsedS: number | null;
  readonly ranks: readonly IRankFacts[];
  readonly metrics: readonly { readonly name: string; readonly value: number | null }[];
  readonly notes: readonly string[];
  /** Whether the kernel listens to the controls, and whether a checkpoint has a place. */
  readonly canBeSteered: boolean;
  readonly canSave: boolean;
  /** What became of the last thing that was asked for. */
  readonly said: string;
  /** How many runs there are to compare with; the kernel is asked which. */
  readonly numEarlier: number;
}

export interface IPanelMessage {
  readonly kind: 'delta' | 'snapshot';
  /** The sequence number that a delta follows on. */
  readonly base: number;
  readonly seq: number;
  readonly blocks: readonly IBlock[];
  readonly facts: IFacts;
  readonly marks: readonly IMark[] | null;
  /** The latest maps of memory, where they are other ones than before. */
  readonly maps: readonly IMemoryMap[] | null;
}

export function parseMessage(content: unknown, buffers: readonly ArrayBufferView[]): IPanelMessage {
  const message = asRecord(content, 'message');
  const { kind } = message;
  if (message.version !== PROTOCOL_VERSION || (kind !== 'delta' && kind !== 'snapshot')) {
    throw new ProtocolError('not a panel message of this version');
  }
  return {
    kind,
    base: asCount(message.base, 'base'),
    seq: asCount(message.seq, 'seq'),
    blocks: parseBlocks(message.blocks, buffers),
    facts: parseFacts(message.facts),
    marks: message.marks === undefined || message.marks === null ? null : parseMarks(message.marks),
    maps: message.maps === undefined || message.maps === null ? null : parseMaps(message.maps)
  };
}

export function parseBlocks(value: unknown, buffers: readonly ArrayBufferView[]): IBlock[] {
  const numbers = alignedNumbers(buffers[0]);
  let offset = 0;
  const blocks = asList(value, 'blocks', MAX_BLOCKS).map(item => {
    const header = asRecord(item, 'block');
    const table = header.table;
    if (!isTableKind(table)) {
      throw new ProtocolError('unknown table');
    }
    const numRows = asCount(header.rows, 'rows');
    const size = numRows * TABLE_COLUMNS[table].length;
    if (numRows > MAX_BLOCK_ROWS || offset + size > numbers.length) {
      throw new ProtocolError('a block is longer than its buffer');
    }
    const values = numbers.subarray(offset, offset + size);
    offset += size;
    return { table, rank: asRank(header.rank), name: asText(header.name), numRows, values };
  });
  if (offset !== numbers.length) {
    throw new ProtocolError('a buffer is longer than its blocks');
  }
  return blocks;
}

function isTableKind(value: unknown): value is TableKind {
  return typeof value === 'string' && Object.prototype.hasOwnProperty.call(TABLE_COLUMNS, value);
}

/** Copy the buffer: it need not start on a multiple of eight. */
function alignedNumbers(buffer: ArrayBufferView | undefined): Float64Array {
  if (buffer === undefined) {
    return new Float64Array(0);
  }
  if (buffer.byteLength % 8 !== 0) {
    throw new ProtocolError('a buffer does not hold whole numbers');
  }
  const bytes = new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength);
  return new Float64Array(bytes.slice().buffer);
}

function parseFacts(value: unknown): IFacts {
  const facts = asRecord(value, 'facts');
  const { status } = facts;
  if (
    status !== 'running' &&
    status !== 'done' &&
    status !== 'failed' &&
    status !== 'interrupted'
  ) {
    throw new ProtocolError('unknown status');
  }
  return {
    title: asText(facts.title),
    status,
    numWorkers: asCount(facts.num_workers, 'num_workers'),
    step: asCount(facts.step, 'step'),
    loss: asNumber(facts.loss),
    learningRate: asNumber(facts.learning_rate),
    samplesPerS: asNumber(facts.samples_per_s),
    stepMs: asNumber(facts.step_ms),
    elapsedS: asNumber(facts.elapsed_s),
    ranks: asList(facts.ranks, 'ranks', MAX_RANKS).map(parseRank),
    metrics: asList(facts.metrics, 'metrics', MAX_METRICS).map(item => {
      const metric = asRecord(item, 'metric');
      return { name: asText(metric.name), value: asNumber(metric.value) };
    }),
    notes: asList(facts.notes, 'notes', MAX_NOTES).map(asText),
    canBeSteered: facts.can_be_steered === true,
    canSave: facts.can_save === true,
    said: asText(facts.said),
    numEarlier: asCount(facts.num_earlier ?? 0, 'num_earlier')
  };
}

function parseRank(value: unknown): IRankFacts {
  const rank = asRecord(value, 'rank');
  return {
    rank: asRank(rank.rank),
    device: asText(rank.device),
    stepMs: asNumber(rank.step_ms),
    isStraggler: rank.is_straggler === true
  };
}

function parseMarks(value: unknown): IMark[] {
  return asList(value, 'marks', MAX_MARKS).map(item => {
    const mark = asRecord(item, 'mark');
    if (!isMarkKind(mark.kind)) {
      throw new ProtocolError('unknown mark');
    }
    const x = asNumber(mark.x) ?? NaN;
    return { x, kind: mark.kind, rank: asRank(mark.rank), text: asText(mark.text) };
  });
}
