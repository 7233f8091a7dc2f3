import { describe, expect, it } from 'vitest';
import { optionLines } from '../src/model/options';
import { parseSidebarState } from '../src/model/sidebarState';

const STATE = {
  kind: 'state',
  version: 1,
  devices: [{ name: 'cpu', kind: 'cpu', total_bytes: 1024 }],
  pool: { state: 'ready', workers: [{ rank: 0, device: 'cpu', pid: 7 }] },
  notes: []
};

describe('parseSidebarState', () => {
  it('reads what the kernel sends', () => {
    expect(parseSidebarState(STATE)).toEqual({
      devices: [{ name: 'cpu', kind: 'cpu', totalBytes: 1024 }],
      pool: 'ready',
      workers: [{ rank: 0, device: 'cpu', pid: 7 }],
      notes: []
    });
  });

  it.each([[null], ['x'], [{ ...STATE, version: 9 }], [{ ...STATE, pool: [] }]])('refuses %j', data => {
    expect(parseSidebarState(data)).toBeNull();
  });

  it('drops what is no line and cuts what is long', () => {
    const state = parseSidebarState({ ...STATE, devices: [null, 3, { name: 'x'.repeat(999) }], notes: 7 });
    expect(state?.devices).toHaveLength(1);
    expect(state?.devices[0]?.name).toHaveLength(256);
    expect(state?.notes).toEqual([]);
  });
});

describe('optionLines', () => {
  it('lists the flags of the generated schema', () => {
    const flags = optionLines().map(option => option.flag);
    expect(flags).toContain('--precision');
    expect(flags).toContain('--show-ranks');
    expect(flags).not.toContain('--ddp');
  });
});
