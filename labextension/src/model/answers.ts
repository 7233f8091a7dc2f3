/** The kernel's answers to a panel's queries (`accel_nb/ui/queries.py`), with every field checked. */

import {
  PANEL_VERSION,
  type IDetailQuery,
  type IEarlierCurveQuery,
  type IEarlierRunFacts as IEarlierRun
} from '../generated/messages';
import { asCount, asList, asNumber, asRecord, asText, ProtocolError } from './checks';
import { parseBlocks, type IBlock } from './protocol';

export type { IEarlierRun };

const MAX_RUNS = 16;
const MAX_POINTS = 4000;

/** The kernel's rows of a range of a curve; earlier messages may have contained downsampled rows only. */
export interface IDetail extends IDetailQuery {
  readonly blocks: readonly IBlock[];
}

/** The runs to compare with, newest first. */
export interface IEarlierList {
  readonly kind: 'earlier';
  readonly runs: readonly IEarlierRun[];
}

/** One curve of an earlier run, the mean over its ranks. */
export interface IEarlierCurve {
  readonly kind: 'earlier curve';
  readonly run: IEarlierCurveQuery['run'];
  readonly numWorkers: number;
  readonly blocks: readonly IBlock[];
}

/** Every row of the run: as text, or as a file in the notebook's folder; neither if the kernel no longer has them. */
export interface ICsv {
  readonly kind: 'csv';
  readonly text: string | null;
  readonly file: string | null;
}

/** The name of the HTML file that the kernel has written; null if it no longer has the rows. */
export interface IShared {
  readonly kind: 'share';
  readonly file: string | null;
}

export type Answer = IDetail | IEarlierList | IEarlierCurve | ICsv | IShared;

/** Whether a message is the answer to a query, which `parseAnswer` parses. */
export function isAnswer(content: unknown): boolean {
  return (
    typeof content === 'object' &&
    content !== null &&
    'kind' in content &&
    typeof content.kind === 'string' &&
    ['detail', 'earlier', 'earlier curve', 'csv', 'share'].includes(content.kind)
  );
}

export function parseAnswer(content: unknown, buffers: readonly ArrayBufferView[]): Answer {
  const message = asRecord(content, 'message');
  if (message.version !== PANEL_VERSION) {
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
    case 'share':
      return { kind: 'share', file: asTextOrNull(message.file) };
    case 'csv':
      return { kind: 'csv', text: asTextOrNull(message.text), file: asTextOrNull(message.file) };
  }
  throw new ProtocolError('no answer');
}

function asTextOrNull(value: unknown): string | null {
  return typeof value === 'string' ? value : null;
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

function isCurve(table: unknown): table is IDetailQuery['table'] {
  return table === 'step' || table === 'metric';
}

function parseRun(value: unknown): IEarlierRun {
  const run = asRecord<IEarlierRun>(value, 'run');
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
