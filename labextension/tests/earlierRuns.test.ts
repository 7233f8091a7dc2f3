import { describe, expect, it } from 'vitest';
import type { Query } from '../src/generated/messages';
import { isAnswer, parseAnswer, type IEarlierCurve } from '../src/model/answers';
import { EarlierRuns } from '../src/model/earlierRuns';
import { ProtocolError } from '../src/model/protocol';
import { misaligned } from './messages';

const HOSTILE = '<img src=x onerror=alert(1)>';

/** A step table with two rows: samples 8 and 16. */
function stepCurve(run: number, extra: Record<string, unknown> = {}): IEarlierCurve {
  const content = {
    kind: 'earlier curve',
    version: 1,
    run,
    num_workers: 2,
    blocks: [{ table: 'step', rank: 0, name: '', rows: 2 }],
    ...extra
  };
  const buffer = misaligned(Float64Array.of(1, 2, 0.5, 0.4, 0.1, 0.1, 5, 5, 8, 16, 0.1, 0.2));
  return parseAnswer(content, [buffer]) as IEarlierCurve;
}

function metricCurve(run: number): IEarlierCurve {
  const blocks = [{ table: 'metric', rank: 0, name: 'accuracy', rows: 1 }];
  const content = { kind: 'earlier curve', version: 1, run, num_workers: 2, blocks };
  return parseAnswer(content, [misaligned(Float64Array.of(2, 0.9))]) as IEarlierCurve;
}

function start() {
  const asked: Query[] = [];
  const runs = new EarlierRuns(
    query => asked.push(query),
    () => undefined
  );
  runs.setRuns([
    { run: 2, title: HOSTILE, summary: '' },
    { run: 1, title: 'first', summary: '' }
  ]);
  return { runs, asked };
}

const LOSS = { table: 'step', name: '' } as const;
const ACCURACY = { table: 'metric', name: 'accuracy' } as const;

describe('EarlierRuns', () => {
  it('queries a curve once, when its run is chosen, and draws it after the answer', () => {
    const { runs, asked } = start();
    expect(runs.lines(LOSS, 'step')).toEqual([]);
    expect(asked).toEqual([]);
    runs.choose(1, true);
    expect(runs.lines(LOSS, 'step')).toEqual([]);
    runs.lines(LOSS, 'step');
    expect(asked).toEqual([{ kind: 'earlier', run: 1, table: 'step', name: '' }]);
    runs.addCurve(stepCurve(1));
    const [line] = runs.lines(LOSS, 'samples');
    expect(line!.title).toBe('first');
    expect([...line!.axis.positions(0, line!.table)]).toEqual([16, 32]);
    runs.choose(1, false);
    expect(runs.lines(LOSS, 'step')).toEqual([]);
  });

  it('positions a metric by the steps of its run', () => {
    const { runs, asked } = start();
    runs.choose(1, true);
    runs.lines(ACCURACY, 'samples');
    expect(asked).toMatchObject([{ table: 'step' }, { table: 'metric' }]);
    runs.addCurve(metricCurve(1));
    expect(runs.lines(ACCURACY, 'samples')).toEqual([]); // its steps are not here yet
    expect(runs.lines(ACCURACY, 'step')).toHaveLength(1);
    runs.addCurve(stepCurve(1));
    const [line] = runs.lines(ACCURACY, 'samples');
    expect([...line!.axis.positions(0, line!.table)]).toEqual([32]);
  });

  it('drops curves that were not queried', () => {
    const { runs } = start();
    runs.addCurve(stepCurve(1));
    runs.choose(1, true);
    runs.addCurve(metricCurve(1));
    expect(runs.lines(LOSS, 'step')).toEqual([]);
    runs.addCurve(stepCurve(7));
    expect(runs.lines(LOSS, 'step')).toEqual([]);
  });

  it('keeps a chosen run that the kernel has dropped', () => {
    const { runs } = start();
    runs.choose(1, true);
    runs.setRuns([{ run: 3, title: 'third', summary: '' }]);
    expect(runs.runs!.map(run => run.run)).toEqual([3, 1]);
  });
});

describe('answers', () => {
  it.each([
    ['another version', { version: 2 }],
    ['a run that is no number', { run: '1' }],
    ['a table of memory', { blocks: [{ table: 'memory', rank: 0, name: '', rows: 1 }] }],
    ['rows that are not there', { blocks: [{ table: 'step', rank: 0, name: '', rows: 3 }] }]
  ])('refuse %s', (_, change) => {
    expect(() => stepCurve(1, change)).toThrow(ProtocolError);
  });

  it('are refused with more points than a chart allows', () => {
    const blocks = [{ table: 'metric', rank: 0, name: 'x', rows: 5000 }];
    const content = { kind: 'earlier curve', version: 1, run: 1, num_workers: 1, blocks };
    const buffer = misaligned(new Float64Array(10_000));
    expect(() => parseAnswer(content, [buffer])).toThrow(ProtocolError);
  });

  it('are recognized among other messages, and long texts are cut', () => {
    expect(isAnswer({ kind: 'delta' })).toBe(false);
    const runs = [{ run: 1, title: 'x'.repeat(9999), summary: null }];
    const content = { kind: 'earlier', version: 1, blocks: [], runs };
    expect(isAnswer(content)).toBe(true);
    const answer = parseAnswer(content, []);
    expect(answer.kind === 'earlier' && answer.runs[0]!.title).toHaveLength(256);
    const many = { ...content, runs: new Array<object>(17).fill(runs[0]!) };
    expect(() => parseAnswer(many, [])).toThrow(ProtocolError);
  });
});
