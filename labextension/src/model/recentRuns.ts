/** Recorded runs, with every field checked. The kernel's side is `accel_nb/notebook/reports/recent_runs.py`. */

import { asList, asNumber, asText, isRecord } from './reading';

const MAX_RUNS = 20;
const MAX_POINTS = 256;
const MAX_LISTED = 64;
const MAX_ERROR = 2048;
const MAX_LINE = 16_384;
/** The latest time that a `Date` can represent, in seconds. */
const MAX_TIME = 8.64e12;

const OUTCOMES = ['running', 'done', 'failed', 'interrupted'] as const;

export type Outcome = (typeof OUTCOMES)[number];

export interface IRecentRun {
  readonly id: string;
  readonly name: string;
  readonly kind: string;
  readonly outcome: Outcome;
  /** Seconds since the epoch. */
  readonly started: number;
  readonly durationS: number | null;
  readonly numSteps: number;
  /** The name of the metric to draw: the loss, or the first logged metric; empty if there is none. */
  readonly metric: string;
  readonly value: number | null;
  readonly steps: readonly number[];
  readonly values: readonly number[];
}

export interface IRunDetails {
  readonly id: string;
  readonly facts: readonly { readonly name: RunFact; readonly text: string }[];
  readonly error: string;
  readonly checkpoints: readonly string[];
  readonly numCheckpoints: number;
  readonly metrics: readonly { readonly name: string; readonly value: number | null }[];
  readonly options: readonly {
    readonly option: string;
    readonly value: string;
    readonly source: string;
  }[];
  /** The flags that set the same options; null if they cannot be written in one line. */
  readonly line: string | null;
}

const FACTS = ['target', 'code', 'folder', 'machine', 'packages'] as const;

export type RunFact = (typeof FACTS)[number];

export function parseRuns(body: Readonly<Record<string, unknown>>): IRecentRun[] {
  return asList(body.runs, MAX_RUNS)
    .filter(isRecord)
    .map(run => {
      const steps = numbers(run.steps);
      const values = numbers(run.values);
      const isCurve = steps.length === values.length;
      return {
        id: asText(run.id),
        name: asText(run.name),
        kind: asText(run.kind),
        outcome: OUTCOMES.find(outcome => outcome === run.outcome) ?? 'failed',
        started: Math.min(MAX_TIME, Math.max(0, asNumber(run.started))),
        durationS: numberOrNull(run.duration_s),
        numSteps: asNumber(run.num_steps),
        metric: asText(run.metric),
        value: numberOrNull(run.value),
        steps: isCurve ? steps : [],
        values: isCurve ? values : []
      };
    });
}

export function parseRunDetails(body: Readonly<Record<string, unknown>>): IRunDetails {
  return {
    id: asText(body.id),
    facts: FACTS.map(name => ({ name, text: asText(body[name]) })).filter(fact => fact.text !== ''),
    error: asText(body.error, MAX_ERROR),
    checkpoints: asList(body.checkpoints, MAX_LISTED).map(url => asText(url)),
    numCheckpoints: asNumber(body.num_checkpoints),
    metrics: asList(body.metrics, MAX_LISTED)
      .filter(isRecord)
      .map(metric => ({ name: asText(metric.name), value: numberOrNull(metric.value) })),
    options: asList(body.options, MAX_LISTED)
      .filter(isRecord)
      .map(row => ({
        option: asText(row.option),
        value: asText(row.value),
        source: asText(row.source)
      })),
    line: asLine(body.line)
  };
}

/** The value if it is a text without line breaks and control characters, else null. */
function asLine(value: unknown): string | null {
  const isLine =
    typeof value === 'string' && value.length <= MAX_LINE && !/[\p{Cc}\p{Zl}\p{Zp}]/u.test(value);
  return isLine ? value : null;
}

function numberOrNull(value: unknown): number | null {
  return typeof value === 'number' && Number.isFinite(value) ? value : null;
}

function numbers(value: unknown): number[] {
  return asList(value, MAX_POINTS).filter(
    (item): item is number => typeof item === 'number' && Number.isFinite(item)
  );
}
