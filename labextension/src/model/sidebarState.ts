/** Messages of the kernel (`accel_nb/ui/comm.py`) to the sidebar, with every field checked. */

import {
  SIDEBAR_VERSION,
  type IDeviceLine as IWireDeviceLine,
  type ILogLine as IWireLogLine,
  type IMetricFact as IWireMetricFact,
  type IRunLine as IWireRunLine,
  type IWorkerLine as IWireWorkerLine
} from '../generated/messages';
import type { Checked, Unchecked } from './checks';
import { asList, asNumber, asText, isRecord } from './reading';

const MAX_LINES = 1024;
const MAX_TEXT = 1024;

export type IDeviceLine = Checked<IWireDeviceLine>;
export type IWorkerLine = Checked<IWireWorkerLine>;
export type ILogLine = Checked<IWireLogLine>;

/** The cell that is running. */
export interface IRunLine {
  readonly title: string;
  readonly step: number;
  /** From 0 to 1; null where the length of the run is not known. */
  readonly fraction: number | null;
  readonly remainingS: number | null;
  readonly losses: readonly { readonly name: string; readonly value: number | null }[];
}

export interface ISidebarState {
  readonly devices: readonly IDeviceLine[];
  readonly pool: string;
  readonly workers: readonly IWorkerLine[];
  readonly notes: readonly string[];
  readonly logs: readonly ILogLine[];
  /** A stamp that changes when a run begins or ends; empty if no run is recorded. */
  readonly runs: string;
  readonly run: IRunLine | null;
}

/** Parse the state in a comm message; null for any other message. */
export function parseSidebarState(data: unknown): ISidebarState | null {
  if (
    !isRecord(data) ||
    data.kind !== 'state' ||
    data.version !== SIDEBAR_VERSION ||
    !isRecord(data.pool)
  ) {
    return null;
  }
  return {
    devices: lines<IWireDeviceLine>(data.devices).map(device => ({
      name: asText(device.name),
      kind: asText(device.kind),
      totalBytes: asNumber(device.total_bytes),
      freeBytes: asNumber(device.free_bytes)
    })),
    pool: asText(data.pool.state),
    workers: lines<IWireWorkerLine>(data.pool.workers).map(worker => ({
      rank: asNumber(worker.rank),
      device: asText(worker.device),
      pid: asNumber(worker.pid),
      memoryBytes: asNumber(worker.memory_bytes)
    })),
    notes: asList(data.notes, 16).map(note => asText(note, MAX_TEXT)),
    logs: lines<IWireLogLine>(data.logs).map(log => ({
      rank: asNumber(log.rank),
      log: asText(log.log),
      numBytes: asNumber(log.num_bytes)
    })),
    runs: asText(data.runs),
    run: parseRun(data.run)
  };
}

function parseRun(value: unknown): IRunLine | null {
  if (!isRecord(value)) {
    return null;
  }
  const run = value as Unchecked<IWireRunLine>;
  const fraction = numberOrNull(run.fraction);
  return {
    title: asText(run.title),
    step: asNumber(run.step),
    fraction: fraction === null ? null : Math.min(1, Math.max(0, fraction)),
    remainingS: numberOrNull(run.remaining_s),
    losses: asList(run.losses, 4)
      .filter(isRecord)
      .map(item => {
        const { name, value } = item as Unchecked<IWireMetricFact>;
        return { name: asText(name), value: numberOrNull(value) };
      })
  };
}

function numberOrNull(value: unknown): number | null {
  return typeof value === 'number' && Number.isFinite(value) ? value : null;
}

/** The kernel's reply to the request `id`: the body of an answer, or the text of a refusal. */
export type Reply =
  | { readonly id: number; readonly body: Readonly<Record<string, unknown>> }
  | { readonly id: number; readonly refusal: string };

export function parseReply(data: unknown): Reply | null {
  if (!isRecord(data) || data.version !== SIDEBAR_VERSION || typeof data.id !== 'number') {
    return null;
  }
  if (data.kind === 'answer' && isRecord(data.body)) {
    return { id: data.id, body: data.body };
  }
  return data.kind === 'refusal' ? { id: data.id, refusal: asText(data.text, MAX_TEXT) } : null;
}

/** One option's value as the kernel resolved it, and its origin. */
export interface IResolvedOption {
  readonly value: string;
  readonly layer: string;
  readonly source: string;
}

export interface IResolution {
  readonly options: ReadonlyMap<string, IResolvedOption>;
  /** The devices of the workers that a run with these options uses. */
  readonly devices: readonly string[];
  readonly problems: readonly string[];
  readonly notes: readonly string[];
}

export function parseResolution(body: Readonly<Record<string, unknown>>): IResolution {
  return {
    options: new Map(
      lines(body.rows).map(row => [
        asText(row.option),
        { value: asText(row.value), layer: asText(row.layer), source: asText(row.source) }
      ])
    ),
    devices: asList(body.devices, MAX_LINES).map(device => asText(device)),
    problems: asList(body.problems, 64).map(problem => asText(problem, MAX_TEXT)),
    notes: asList(body.notes, 64).map(note => asText(note, MAX_TEXT))
  };
}

export interface ILogPart {
  readonly rank: number;
  readonly log: string;
  readonly text: string;
  readonly start: number;
  readonly end: number;
}

export function parseLogPart(body: Readonly<Record<string, unknown>>): ILogPart {
  return {
    rank: asNumber(body.rank),
    log: asText(body.log),
    text: typeof body.text === 'string' ? body.text : '',
    start: asNumber(body.start),
    end: asNumber(body.end)
  };
}

/** Problems by the option whose name or flag they begin with; others are under ''. */
export function problemsByOption(
  problems: readonly string[],
  optionOf: (word: string) => string | undefined
): ReadonlyMap<string, readonly string[]> {
  const found = new Map<string, string[]>();
  for (const problem of problems) {
    const word = /^(?:--)?([\w.-]+)/.exec(problem)?.[1] ?? '';
    const option = optionOf(word) ?? '';
    found.set(option, [...(found.get(option) ?? []), problem]);
  }
  return found;
}

function lines<Wire = Record<string, unknown>>(value: unknown): Unchecked<Wire>[] {
  return asList(value, MAX_LINES).filter(isRecord);
}
