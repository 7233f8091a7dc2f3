import { describe, expect, it } from 'vitest';
import type { SidebarChannel } from '../src/channel';
import { sparkline } from '../src/chart/sparkline';
import {
  parseComparison,
  parseRunDetails,
  parseRuns,
  parseTags,
  selectRuns
} from '../src/model/recentRuns';
import { RecentRuns } from '../src/sidebar/recentRuns';

const RUN = {
  id: '20261121-140000-abcdef',
  name: 'digits',
  kind: 'cell',
  outcome: 'done',
  started: 1.7e9,
  duration_s: 12.5,
  num_steps: 100,
  metric: 'loss',
  value: 0.04,
  steps: [1, 2],
  values: [2.3, 0.04]
};

describe('parseRuns', () => {
  it('parses the answer of the kernel', () => {
    const [run] = parseRuns({ runs: [RUN] });
    expect(run).toMatchObject({ name: 'digits', outcome: 'done', durationS: 12.5, value: 0.04 });
    expect(run?.values).toEqual([2.3, 0.04]);
  });

  it('limits and sanitizes forged fields', () => {
    const forged = {
      ...RUN,
      name: 'x'.repeat(999),
      outcome: 'constructor',
      started: 1e300,
      duration_s: '<b>',
      steps: [1, 2, 3],
      values: [1, null, 'x']
    };
    const runs = parseRuns({ runs: [null, 3, ...Array<unknown>(150).fill(forged)] });
    expect(runs.length).toBeLessThanOrEqual(100);
    expect(runs[0]?.name).toHaveLength(256);
    expect(runs[0]).toMatchObject({ outcome: 'failed', durationS: null, steps: [], values: [] });
    expect(new Date((runs[0]?.started ?? NaN) * 1000).getTime()).not.toBeNaN();
    expect(parseRuns({ runs: 'x' })).toEqual([]);
  });
});

describe('parseRunDetails', () => {
  it('accepts a line without line breaks only', () => {
    expect(parseRunDetails({ line: '--cpus 2' }).line).toBe('--cpus 2');
    expect(parseRunDetails({ line: '' }).line).toBe('');
    for (const line of ['--cpus 2\n!rm', 'a\u2028b', 'a\u0000', 'x'.repeat(99_999), null, ['x']]) {
      expect(parseRunDetails({ line }).line).toBeNull();
    }
  });

  it('omits unknown facts', () => {
    const details = parseRunDetails({ target: 'train()', code: '', options: [7, { option: 'seed' }] });
    expect(details.facts).toEqual([{ name: 'target', text: 'train()' }]);
    expect(details.options).toEqual([{ option: 'seed', value: '', source: '' }]);
  });
});

describe('selectRuns', () => {
  const runs = parseRuns({
    runs: [
      { ...RUN, id: 'a', name: 'wide', started: 3, value: null, tags: ['best'], notebook: '/x/digits.ipynb' },
      { ...RUN, id: 'b', name: 'Deep', started: 2, value: 0.5, starred: true },
      { ...RUN, id: 'c', name: 'small', started: 1, value: 0.1, duration_s: null }
    ]
  });
  const ids = (...args: [string, boolean, Parameters<typeof selectRuns>[3]]): string =>
    selectRuns(runs, ...args)
      .map(run => run.id)
      .join('');

  it('sorts, with runs that have no value last', () => {
    expect(ids('', false, 'newest')).toBe('abc');
    expect(ids('', false, 'name')).toBe('bca');
    expect(ids('', false, 'value')).toBe('cba');
    expect(ids('', false, 'duration').at(-1)).toBe('c');
  });

  it('searches names, tags and notebooks for every word, and filters by star', () => {
    expect(ids('BEST digits', false, 'newest')).toBe('a');
    expect(ids('best deep', false, 'newest')).toBe('');
    expect(ids('', true, 'newest')).toBe('b');
  });
});

describe('labels and comparisons', () => {
  it('reads tags between commas', () => {
    expect(parseTags(' a,b c,, a ')).toEqual(['a', 'b c']);
  });

  it('has a value for each run, empty where there is none', () => {
    const rows = [{ name: 'clip', values: ['0.5', null] }, 7, { name: 'seed', values: 'x' }];
    expect(parseComparison({ ids: ['a', 'b'], rows }).rows).toEqual([
      { name: 'clip', values: ['0.5', ''] },
      { name: 'seed', values: ['', ''] }
    ]);
  });
});

describe('sparkline', () => {
  it('fills its box, with outliers on its edge', () => {
    const values = [...Array<number>(99).fill(1).map((_, index) => index / 98), 1e9];
    const steps = values.map((_, index) => index);
    const curve = sparkline(steps, values, 90, 20);
    expect(curve?.path.startsWith('M0 20L')).toBe(true);
    expect(curve?.end).toEqual([90, 0]);
    expect(curve?.path).not.toMatch(/NaN|Infinity/);
  });

  it('draws a constant in the middle, one point as a dot, and no values as an empty path', () => {
    expect(sparkline([1, 2], [5, 5], 90, 20)?.path).toBe('M0 10L90 10');
    expect(sparkline([1], [5], 90, 20)?.end).toEqual([90, 10]);
    expect(sparkline([], [], 90, 20)).toBeNull();
  });
});

describe('RecentRuns', () => {
  it('reads the runs again when one has begun or ended, and drops one that no longer exists', async () => {
    const requested: string[] = [];
    let isGone = false;
    const channel = {
      request: (topic: string) => {
        requested.push(topic);
        return isGone && topic === 'run'
          ? Promise.reject(new Error('gone'))
          : Promise.resolve(topic === 'run' ? { id: RUN.id, line: '--cpus 2' } : { runs: [RUN] });
      }
    } as unknown as SidebarChannel;
    const recent = new RecentRuns(channel, () => undefined);
    await recent.follow('');
    expect(requested).toEqual([]);
    await recent.follow('one');
    await recent.follow('one');
    expect(requested).toEqual(['runs']);
    recent.show(RUN.id);
    await Promise.resolve();
    await Promise.resolve();
    expect(recent.details?.line).toBe('--cpus 2');
    isGone = true;
    await recent.follow('two');
    expect(recent.shown).toBeNull();
    expect(recent.runs).toHaveLength(1);
  });

  it('shows a refusal by the kernel until the next change succeeds', async () => {
    let isRefused = true;
    const channel = {
      request: (topic: string) =>
        isRefused ? Promise.reject(new Error('too long')) : Promise.resolve({ runs: [RUN], topic })
    } as unknown as SidebarChannel;
    const recent = new RecentRuns(channel, () => undefined);
    await recent.label(RUN.id, { name: 'x' });
    expect(recent.problem).toBe('too long');
    isRefused = false;
    await recent.label(RUN.id, { name: 'y' });
    expect(recent.problem).toBe('');
    expect(recent.runs).toHaveLength(1);
  });
});
