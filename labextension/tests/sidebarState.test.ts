import { describe, expect, it } from 'vitest';
import {
  parseReply,
  parseResolution,
  parseSidebarState,
  problemsByOption
} from '../src/model/sidebarState';

const STATE = {
  kind: 'state',
  version: 3,
  devices: [{ name: 'cpu', kind: 'cpu', total_bytes: 1024, free_bytes: 1000 }],
  pool: { state: 'ready', workers: [{ rank: 0, device: 'cpu', pid: 7, memory_bytes: 64 }] },
  notes: [],
  logs: [{ rank: 0, log: 'a', num_bytes: 12 }],
  runs: 'a1'
};

describe('parseSidebarState', () => {
  it('parses the state of the kernel', () => {
    expect(parseSidebarState(STATE)).toEqual({
      devices: [{ name: 'cpu', kind: 'cpu', totalBytes: 1024, freeBytes: 1000 }],
      pool: 'ready',
      workers: [{ rank: 0, device: 'cpu', pid: 7, memoryBytes: 64 }],
      notes: [],
      logs: [{ rank: 0, log: 'a', numBytes: 12 }],
      runs: 'a1',
      run: null
    });
  });

  it('parses the running cell, with unknown values as null', () => {
    const losses = [{ name: 'loss', value: 0.5 }, 7, { name: 'd_loss', value: 'nan' }];
    const run = { title: 'digits', step: 3, fraction: 7, remaining_s: 'x', losses };
    expect(parseSidebarState({ ...STATE, run })?.run).toEqual({
      title: 'digits',
      step: 3,
      fraction: 1,
      remainingS: null,
      losses: [
        { name: 'loss', value: 0.5 },
        { name: 'd_loss', value: null }
      ]
    });
  });

  it.each([[null], ['x'], [{ ...STATE, version: 9 }], [{ ...STATE, pool: [] }]])(
    'refuses %j',
    data => {
      expect(parseSidebarState(data)).toBeNull();
    }
  );

  it('drops malformed lines and cuts long texts', () => {
    const devices = [null, 3, { name: 'x'.repeat(999), total_bytes: 'many' }];
    const state = parseSidebarState({ ...STATE, devices, notes: 7 });
    expect(state?.devices).toHaveLength(1);
    expect(state?.devices[0]?.name).toHaveLength(256);
    expect(state?.devices[0]?.totalBytes).toBe(0);
    expect(state?.notes).toEqual([]);
  });
});

describe('parseReply', () => {
  it('accepts answers and refusals of this version only', () => {
    expect(parseReply({ kind: 'answer', version: 3, id: 3, body: { a: 1 } })).toEqual({
      id: 3,
      body: { a: 1 }
    });
    expect(parseReply({ kind: 'refusal', version: 3, id: 3, text: 'no' })).toEqual({
      id: 3,
      refusal: 'no'
    });
    expect(parseReply({ kind: 'answer', version: 1, id: 3, body: {} })).toBeNull();
    expect(parseReply({ kind: 'answer', version: 3, id: '3', body: {} })).toBeNull();
    expect(parseReply({ kind: 'answer', version: 3, id: 3, body: [] })).toBeNull();
  });
});

describe('parseResolution', () => {
  it('keeps each value with its origin', () => {
    const row = { option: 'seed', value: '7', layer: 'notebook', source: 'here' };
    const found = parseResolution({ rows: [row, null], devices: ['cpu', 3], problems: 'x' });
    expect(found.options.get('seed')).toEqual({ value: '7', layer: 'notebook', source: 'here' });
    expect(found.options.size).toBe(1);
    expect(found.devices).toEqual(['cpu', '']);
    expect(found.problems).toEqual([]);
  });
});

describe('problemsByOption', () => {
  it('assigns a line to the option that it begins with', () => {
    const lines = ['seed: x is not allowed', '--clip needs a value', '--sed is no flag', 'other'];
    const known: Record<string, string> = { seed: 'seed', clip: 'clip' };
    const found = problemsByOption(lines, word => known[word]);
    expect(found.get('seed')).toEqual([lines[0]]);
    expect(found.get('clip')).toEqual([lines[1]]);
    expect(found.get('')).toEqual(lines.slice(2));
  });
});
