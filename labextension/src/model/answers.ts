/** What the kernel answers when a panel asks: `accel_nb/ui/queries.py`. Checked field by field, as every message. */

import { asCount, asList, asNumber, asRecord, asText, ProtocolError } from './checks';
import { parseBlocks, PROTOCOL_VERSION, type IBlock } from './protocol';

const MAX_RUNS = 16;
const MAX_POINTS = 4000;

/** Every row that the kernel has of a part of a curve: what travelled before may be its extremes only. */
export interface IDetail {
  readonly kind: 'detail';
  readonly table: 'step' | 'metric';
  readonly name: string;
  readonly first: number;
  readonly last: number;
  readonly blocks: readonly IBlock[];
}

export interface IEarlierRun {
  readonly run: number;
  readonly title: string;
  readonly summary: string;
}

/** Which runs there are to compare with, the newest first. */
export interface IEarlierList {
  readonly kind: 'earlier';
  readonly runs: readonly IEarlierRun[];
}

/** One curve of an earlier run, the mean over its ranks. */
export interface IEarlierCurve {
  readonly kind: 'earlier curve';
  readonly run: number;
  readonly numWorkers: number;
  readonly blocks: readonly IBlock[];
}

export type Answer = IDetail | IEarlierList | IEarlierCurve;

/** Whether a message answers a question; it is then for `parseAnswer`. */
export function isAnswer(content: unknown): boolean {
  return (
    typeof content === 'object' &&
    content !== null &&
    'kind' in content &&
    (content.kind === 'detail' || content.kind === 'earlier' || content.kind === 'earlier curve')
  );
}

export function parseAnswer(content: unknown, buffers: readonly ArrayBufferView[]): Answer {
  const message = asRecord(content, 'message');
  if (message.version !== PROTOCOL_VERSION) {
    throw new ProtocolError('not a panel message of this version');
  }
  const blocks = parseBlocks(message.blocks, buffers);
  switch (message.kind) {
    case 'detail':
      return parseDetail(message, blocks);
    case 'earlier':
      return { kind: 'earlier', runs: asList(message.runs, 'runs', MAX_RUNS).map(parseRun) };
    case 'earlier curve':
      return parseCurve(message, blocks);
  }
  throw new ProtocolError('no answer');
}

function parseDetail(message: Record<string, unknown>, blocks: IBlock[]): IDetail {
  const { table } = message;
  const name = asText(message.name);
  if (!isCurve(table)) {
    throw new ProtocolError('unknown table');
  }
  if (blocks.some(block => block.table !== table || block.name !== name)) {
    throw new ProtocolError('a block of another curve');
  }
  const [first, last] = [asNumber(message.first) ?? NaN, asNumber(message.last) ?? NaN];
  return { kind: 'detail', table, name, first, last, blocks };
}

function isCurve(table: unknown): table is 'step' | 'metric' {
  return table === 'step' || table === 'metric';
}

function parseRun(value: unknown): IEarlierRun {
  const run = asRecord(value, 'run');
  return {
    run: asCount(run.run, 'run'),
    title: asText(run.title),
    summary: asText(run.summary)
  };
}

function parseCurve(message: Record<string, unknown>, blocks: IBlock[]): IEarlierCurve {
  if (blocks.some(({ table, numRows }) => !isCurve(table) || numRows > MAX_POINTS)) {
    throw new ProtocolError('no curve of an earlier run');
  }
  return {
    kind: 'earlier curve',
    run: asCount(message.run, 'run'),
    numWorkers: asCount(message.num_workers, 'num_workers'),
    blocks
  };
}
