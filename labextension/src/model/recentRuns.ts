/** Recorded runs, with every field checked. The kernel's side is `accel_nb/notebook/reports/recent_runs.py`. */

import { asList, asNumber, asText, isRecord } from './reading';

const MAX_RUNS = 100;
const MAX_POINTS = 256;
const MAX_LISTED = 64;
const MAX_TAGS = 20;
const MAX_COMPARED = 8;
const MAX_NOTES = 10_000;
const MAX_ERROR = 2048;
const MAX_LINE = 16_384;
/** The latest time that a `Date` can represent, in seconds. */
const MAX_TIME = 8.64e12;

const OUTCOMES = ['running', 'done', 'failed', 'interrupted'] as const;

export type Outcome = (typeof OUTCOMES)[number];

export interface IRecentRun {
  readonly id: string;
  readonly name: string;
  readonly tags: readonly string[];
  readonly isStarred: boolean;
  /** The path of the notebook; empty for launches, and where the front end does not report it. */
  readonly notebook: string;
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
  /** The name with which the run was recorded, before the user changed it. */
  readonly recordedName: string;
  readonly notes: string;
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

const FACTS = ['target', 'notebook', 'code', 'folder', 'machine', 'packages'] as const;

export type RunFact = (typeof FACTS)[number];

/** The labels that a user gives a run; fields that are left out stay as they are. */
export interface IRunLabels {
  readonly name?: string;
  readonly notes?: string;
  readonly tags?: readonly string[];
  readonly is_starred?: boolean;
}

/** The differences of runs: one row for each fact, with one value for each run. */
export interface IRunComparison {
  readonly ids: readonly string[];
  readonly rows: readonly { readonly name: string; readonly values: readonly string[] }[];
}

export const SORT_ORDERS = ['newest', 'name', 'value', 'duration'] as const;

export type SortOrder = (typeof SORT_ORDERS)[number];

/** Return the runs that contain every word of `filter`, in the given order; runs without a value are last. */
export function selectRuns(
  runs: readonly IRecentRun[],
  filter: string,
  isStarredOnly: boolean,
  order: SortOrder
): IRecentRun[] {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = runs.filter(run => {
    const text = [run.name, run.notebook, run.outcome, run.kind, ...run.tags]
      .join('\n')
      .toLowerCase();
    return (run.isStarred || !isStarredOnly) && words.every(word => text.includes(word));
  });
  const byNumber = (of: (run: IRecentRun) => number | null): IRecentRun[] =>
    found.sort((a, b) => (of(a) ?? Infinity) - (of(b) ?? Infinity) || 0);
  switch (order) {
    case 'newest':
      return found.sort((a, b) => b.started - a.started);
    case 'name':
      return found.sort((a, b) => a.name.localeCompare(b.name));
    case 'value':
      return byNumber(run => run.value);
    case 'duration':
      return byNumber(run => run.durationS);
  }
}

/** Return the tags in a text with commas between them. */
export function parseTags(text: string): string[] {
  const tags = text.split(',').map(tag => tag.trim());
  return [...new Set(tags)].filter(Boolean);
}

export function parseComparison(body: Readonly<Record<string, unknown>>): IRunComparison {
  const ids = asList(body.ids, MAX_COMPARED).map(id => asText(id));
  return {
    ids,
    rows: asList(body.rows, MAX_LISTED)
      .filter(isRecord)
      .map(row => {
        const values = asList(row.values, MAX_COMPARED);
        return { name: asText(row.name), values: ids.map((_, index) => asText(values[index])) };
      })
  };
}

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
        tags: asList(run.tags, MAX_TAGS).map(tag => asText(tag)),
        isStarred: run.starred === true,
        notebook: asText(run.notebook),
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
    recordedName: asText(body.recorded_name),
    notes: asText(body.notes, MAX_NOTES),
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
