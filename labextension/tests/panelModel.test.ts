import { describe, expect, it, vi } from 'vitest';
import { PanelModel } from '../src/model/panelModel';
import { parseMessage } from '../src/model/protocol';
import { stepMessage } from './messages';

function message(base: number, rows: number[][], extra: Record<string, unknown> = {}) {
  const { content, buffer } = stepMessage(base, rows, extra);
  return parseMessage(content, [buffer]);
}

describe('PanelModel', () => {
  it('adds up deltas', () => {
    const model = new PanelModel();
    expect(model.apply(message(0, [[1, 0.5, 0.1, 5]]))).toBe(true);
    expect(model.apply(message(1, [[2, 0.4, 0.1, 5]]))).toBe(true);
    expect(model.numPoints).toBe(2);
    expect(model.curves().map(curve => curve.label)).toEqual(['loss', 'learning rate', 'step time']);
  });

  it('refuses a delta that does not follow, and takes a snapshot in its place', () => {
    const model = new PanelModel();
    expect(model.apply(message(7, [[8, 0.5, 0.1, 5]]))).toBe(false);
    expect(model.numPoints).toBe(0);
    const rows = [1, 2, 3].map(step => [step, 0.5, 0.1, 5]);
    expect(model.apply(message(8, rows, { kind: 'snapshot' }))).toBe(true);
    expect(model.numPoints).toBe(3);
    expect(model.apply(message(9, [[4, 0.4, 0.1, 5]]))).toBe(true);
    expect(model.numPoints).toBe(4);
  });

  it('does not draw a snapshot twice', () => {
    const model = new PanelModel();
    model.apply(message(0, [[1, 0.5, 0.1, 5]]));
    model.apply(message(1, [[1, 0.5, 0.1, 5]], { kind: 'snapshot' }));
    expect(model.numPoints).toBe(1);
  });

  it('keeps what schedules plan, until a snapshot says what there is', () => {
    const model = new PanelModel();
    const blocks = [
      { table: 'plan', rank: 0, name: '0', rows: 2 },
      { table: 'plan', rank: 0, name: '1', rows: 1 }
    ];
    const content = { ...stepMessage(0, []).content, blocks };
    const numbers = Float64Array.of(1, 9, 0.1, 0.2, 10, 0.3);
    model.apply(parseMessage(content, [new DataView(numbers.buffer)]));
    expect(model.plans.map(plan => [...plan.column(1)])).toEqual([[0.1, 0.2], [0.3]]);
    expect(model.curves()).toEqual([]);
    model.apply(message(1, [], { kind: 'snapshot' }));
    expect(model.plans).toEqual([]);
  });

  it('tells its listeners until they stop', () => {
    const model = new PanelModel();
    const stopped = new AbortController();
    const listener = vi.fn();
    model.onChange(listener, stopped.signal);
    model.apply(message(0, [[1, 0.5, 0.1, 5]]));
    stopped.abort();
    model.apply(message(1, [[2, 0.5, 0.1, 5]]));
    expect(listener).toHaveBeenCalledTimes(1);
  });

  it('does not keep a flood of names', () => {
    const model = new PanelModel();
    for (let index = 0; index < 3000; index++) {
      const content = {
        ...stepMessage(index, []).content,
        blocks: [{ table: 'metric', rank: 0, name: `m${index}`, rows: 1 }]
      };
      model.apply(parseMessage(content, [new DataView(Float64Array.of(1, 2).buffer)]));
    }
    expect(model.curves()).toHaveLength(2048);
  });
});
