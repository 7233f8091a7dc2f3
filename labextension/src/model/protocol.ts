/**
 * Messages of the kernel to a panel. Each field is checked, since a message may come from a malicious notebook.
 *
 * A message is JSON with one buffer of little-endian float64, which has the blocks in order, each column by column.
 */

import { isMarkKind } from '../chart/palette';
import {
  PANEL_VERSION,
  TABLE_COLUMNS,
  type IBlockHeader,
  type ILoggedMetricFact,
  type IMark,
  type IMetricFact,
  type IPanelFacts,
  type IProgressFacts,
  type IRankFacts as IWireRankFacts,
  type ITimeShares
} from '../generated/messages';
import {
  asCount,
  asList,
  asNumber,
  asRank,
  asRecord,
  asText,
  MAX_RANKS,
  ProtocolError,
  type Checked
} from './checks';
import { parseMemorySnapshots, type IParsedMemorySnapshot } from './memorySnapshot';

export { ProtocolError } from './checks';

const MAX_BLOCKS = 8192;
const MAX_BLOCK_ROWS = 1 << 22;
const MAX_MARKS = 200;
const MAX_METRICS = 32;
const MAX_NOTES = 16;
const MAX_PRINTED = 16_000;

export type TableKind = keyof typeof TABLE_COLUMNS;

export interface IBlock {
  readonly table: TableKind;
  readonly rank: number;
  readonly name: string;
  readonly numRows: number;
  readonly values: Float64Array;
}

export type IFacts = Checked<IPanelFacts>;
export type IRankFacts = Checked<IWireRankFacts>;

export interface IPanelMessage {
  readonly kind: 'delta' | 'snapshot';
  /** The sequence number of the message that a delta follows. */
  readonly base: number;
  readonly seq: number;
  readonly blocks: readonly IBlock[];
  readonly facts: IFacts;
  readonly marks: readonly IMark[] | null;
  /** The latest memory snapshots; null if they have not changed. */
  readonly memorySnapshots: readonly IParsedMemorySnapshot[] | null;
  /** The end of the cell's printed text, for pages that were loaded while it ran; null if it has not changed. */
  readonly text: string | null;
  /** The name of a page that was loaded while the cell ran, and requested its state; else empty. */
  readonly page: string;
}

export function parseMessage(content: unknown, buffers: readonly ArrayBufferView[]): IPanelMessage {
  const message = asRecord(content, 'message');
  const { kind } = message;
  if (message.version !== PANEL_VERSION || (kind !== 'delta' && kind !== 'snapshot')) {
    throw new ProtocolError('not a panel message of this version');
  }
  return {
    kind,
    base: asCount(message.base, 'base'),
    seq: asCount(message.seq, 'seq'),
    blocks: parseBlocks(message.blocks, buffers),
    facts: parseFacts(message.facts),
    marks: message.marks === undefined || message.marks === null ? null : parseMarks(message.marks),
    memorySnapshots:
      message.memory_snapshots === undefined || message.memory_snapshots === null
        ? null
        : parseMemorySnapshots(message.memory_snapshots),
    text: typeof message.text === 'string' ? message.text.slice(-MAX_PRINTED) : null,
    page: typeof message.page === 'string' ? message.page : ''
  };
}

export function parseBlocks(value: unknown, buffers: readonly ArrayBufferView[]): IBlock[] {
  const numbers = alignedNumbers(buffers[0]);
  let offset = 0;
  const blocks = asList(value, 'blocks', MAX_BLOCKS).map(item => {
    const header = asRecord<IBlockHeader>(item, 'block');
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

/** Copy the buffer, since its byte offset may not be a multiple of eight. */
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
  const facts = asRecord<IPanelFacts>(value, 'facts');
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
    progress: parseProgress(facts.progress ?? {}),
    ranks: asList(facts.ranks, 'ranks', MAX_RANKS).map(parseRank),
    losses: asList(facts.losses ?? [], 'losses', MAX_METRICS).map(parseMetric),
    metrics: asList(facts.metrics, 'metrics', MAX_METRICS).map(parseLoggedMetric),
    utilization: asList(facts.utilization ?? [], 'utilization', MAX_METRICS).map(asText),
    notes: asList(facts.notes, 'notes', MAX_NOTES).map(asText),
    acceptsActions: facts.accepts_actions === true,
    canSave: facts.can_save === true,
    actionResult: asText(facts.action_result),
    numEarlier: asCount(facts.num_earlier ?? 0, 'num_earlier')
  };
}

function parseProgress(value: unknown): IFacts['progress'] {
  const progress = asRecord<IProgressFacts>(value, 'progress');
  return {
    epoch: asCount(progress.epoch ?? 0, 'epoch'),
    numEpochs: asCount(progress.num_epochs ?? 0, 'num_epochs'),
    batchFraction: asNumber(progress.batch_fraction ?? null),
    fraction: asNumber(progress.fraction ?? null),
    remainingS: asNumber(progress.remaining_s ?? null)
  };
}

function parseMetric(value: unknown): { name: string; value: number | null } {
  const metric = asRecord<IMetricFact>(value, 'metric');
  return { name: asText(metric.name), value: asNumber(metric.value) };
}

function parseLoggedMetric(value: unknown): IFacts['metrics'][number] {
  const { validates } = asRecord<ILoggedMetricFact>(value, 'metric');
  return {
    ...parseMetric(value),
    validates: typeof validates === 'string' ? asText(validates) : null
  };
}

function parseRank(value: unknown): IRankFacts {
  const rank = asRecord<IWireRankFacts>(value, 'rank');
  return {
    rank: asRank(rank.rank),
    device: asText(rank.device),
    place: asText(rank.place),
    stepMs: asNumber(rank.step_ms),
    isStraggler: rank.is_straggler === true,
    timeUse: parseTimeUse(rank.time_use ?? null),
    processGrowth: asNumber(rank.process_growth ?? null)
  };
}

function parseTimeUse(value: unknown): IRankFacts['timeUse'] {
  if (value === null) {
    return null;
  }
  const shares = asRecord<ITimeShares>(value, 'time_use');
  const share = (part: unknown): number => Math.min(1, Math.max(0, asNumber(part) ?? 0));
  return {
    reading: share(shares.reading),
    computing: share(shares.computing),
    blocked: share(shares.blocked),
    queued: share(shares.queued)
  };
}

function parseMarks(value: unknown): IMark[] {
  return asList(value, 'marks', MAX_MARKS).map(item => {
    const mark = asRecord<IMark>(item, 'mark');
    if (!isMarkKind(mark.kind)) {
      throw new ProtocolError('unknown mark');
    }
    const x = asNumber(mark.x) ?? NaN;
    return { x, kind: mark.kind, rank: asRank(mark.rank), text: asText(mark.text) };
  });
}
