import { describe, expect, it, vi } from 'vitest';
import { ColumnTable } from '../src/chart/columns';
import { TABLE_COLUMNS } from '../src/generated/messages';
import { PanelModel } from '../src/model/panelModel';
import { parseMessage } from '../src/model/protocol';
import { FACTS, stepMessage } from './messages';

function message(base: number, rows: number[][], extra: Record<string, unknown> = {}) {
  const { content, buffer } = stepMessage(base, rows, extra);
  return parseMessage(content, [buffer]);
}

describe('PanelModel', () => {
  it('accumulates deltas', () => {
    const model = new PanelModel();
    expect(model.apply(message(0, [[1, 0.5, 0.1, 5]]))).toBe(true);
    expect(model.apply(message(1, [[2, 0.4, 0.1, 5]]))).toBe(true);
    expect(model.numPoints).toBe(2);
    expect(model.curves().map(curve => curve.label)).toEqual(['loss', 'learning rate', 'step time']);
  });

  it('has a curve for each loss', () => {
    const model = new PanelModel();
    const blocks = (name: string) => ({ blocks: [{ table: 'step', rank: 0, name, rows: 1 }] });
    model.apply(message(0, [[1, 0.5, 0.1, 5]], blocks('d_loss')));
    model.apply(message(1, [[2, 9, 0.2, 5]], blocks('g_loss')));
    const labels = model.curves().map(curve => curve.label);
    expect(labels.slice(0, 3)).toEqual(['d_loss', 'g_loss', 'learning rate of d_loss']);
    expect(new Set(model.curves().map(curve => curve.id)).size).toBe(6);
    expect(model.axes.samples.positionOf(2)).toBe(0);
  });

  it('positions the metrics of a rank by its steps of the first loss, also if a second loss arrives before', () => {
    const model = new PanelModel();
    const blocks = (table: string, rank: number, name: string) => ({
      blocks: [{ table, rank, name, rows: 1 }]
    });
    const samples = TABLE_COLUMNS.step.indexOf('samples');
    const step = (count: number) => [TABLE_COLUMNS.step.map((_, i) => (i === samples ? count : 1))];
    model.apply(message(0, step(8), blocks('step', 0, 'd_loss')));
    model.apply(message(1, step(8), blocks('step', 0, 'g_loss')));
    model.apply(message(2, step(16), blocks('step', 1, 'd_loss')));
    const logged = new ColumnTable(TABLE_COLUMNS.metric.length, 1);
    logged.append(Float64Array.from(TABLE_COLUMNS.metric.map(() => 1)), 1);
    const numWorkers = model.facts!.numWorkers;
    expect([...model.axes.samples.positions(1, logged)]).toEqual([16 * numWorkers]);
  });

  it('draws a validation loss with the loss that it validates', () => {
    const model = new PanelModel();
    const metric = (name: string) => ({ table: 'metric', rank: 0, name, rows: 3 });
    const logged = (name: string, validates: string | null) => ({ name, value: 0.4, validates });
    const metrics = [logged('val_loss', ''), logged('accuracy', null), logged('val_other', 'other')];
    const facts = { ...FACTS, metrics };
    model.apply(message(0, [[1, 0.5, 0.1, 5]], { facts }));
    metrics.forEach(({ name }, index) => {
      const rows = [[10, 20, 30, 0.6, 0.5, 0.4]];
      expect(model.apply(message(index + 1, rows, { blocks: [metric(name)], facts }))).toBe(true);
    });
    const [loss, rate] = model.curves();
    const [validation, ...others] = model.validationCurves(loss!);
    expect(validation?.name).toBe('val_loss');
    expect([...validation!.tables.get(0)!.column(1)]).toEqual([0.6, 0.5, 0.4]);
    expect(others).toEqual([]);
    expect(model.validationCurves(rate!)).toEqual([]);
    expect(model.validationCurves(validation!)).toEqual([]);
    const apart = model.curves().filter(curve => model.validatedLoss(curve) === null);
    expect(apart.map(curve => curve.label)).toContain('val_other');
  });

  it('has printed text in pages other than the one that started the cell', () => {
    const running = { facts: { ...FACTS, status: 'running' } };
    const done = { facts: { ...FACTS, status: 'done' }, text: 'trained' };
    const started = new PanelModel();
    started.apply(message(0, [[1, 0.5, 0.1, 5]], running));
    started.apply(message(1, [[2, 0.4, 0.1, 5]], done));
    expect(started.text).toBe('');
    const reloaded = new PanelModel();
    reloaded.apply(message(0, [[1, 0.5, 0.1, 5]], { ...running, page: reloaded.page, text: 'epoch 1' }));
    expect(reloaded.text).toBe('epoch 1');
    const opened = new PanelModel();
    opened.apply(message(0, [[1, 0.5, 0.1, 5]], done));
    expect(opened.text).toBe('trained');
  });

  it('resolves to the CSV of the kernel, or to null without a kernel', async () => {
    const model = new PanelModel();
    const asked = model.queryCsv(1000);
    model.applyAnswer({ kind: 'csv', text: 'step\n1\n', file: null });
    expect((await asked)?.text).toBe('step\n1\n');
    expect(await model.queryCsv(1)).toBeNull();
  });

  it('queries the CSV once for two requests', async () => {
    const model = new PanelModel();
    model.query = vi.fn();
    const requests = Promise.all([model.queryCsv(10_000), model.queryCsv(1)]);
    model.applyAnswer({ kind: 'csv', text: 'step\n1\n', file: null });
    expect((await requests).map(answer => answer?.text)).toEqual(['step\n1\n', 'step\n1\n']);
    expect(model.query).toHaveBeenCalledTimes(1);
  });

  it('shows printed text in a page that was loaded while the cell ran', () => {
    const [first, second] = [new PanelModel(), new PanelModel()];
    for (const model of [first, second]) {
      model.apply(message(0, [], { kind: 'snapshot', text: 'epoch 3', page: second.page }));
    }
    expect([first.text, second.text]).toEqual(['', 'epoch 3']);
  });

  it('refuses a delta out of sequence, and accepts a snapshot instead', () => {
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

  it('keeps planned rates until a snapshot replaces them', () => {
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

  it('notifies listeners until they stop', () => {
    const model = new PanelModel();
    const stopped = new AbortController();
    const listener = vi.fn();
    model.onChange(listener, stopped.signal);
    model.apply(message(0, [[1, 0.5, 0.1, 5]]));
    stopped.abort();
    model.apply(message(1, [[2, 0.5, 0.1, 5]]));
    expect(listener).toHaveBeenCalledTimes(1);
  });

  it('drops tables above the limit', () => {
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
