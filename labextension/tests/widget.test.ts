import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import define from '../src/widget/index';
import { FACTS, stepMessage } from './messages';

type Handler = (...values: unknown[]) => void;

/** anywidget's model as far as the widget uses it. */
class FakeModel {
  readonly sent: unknown[] = [];
  readonly traits: Record<string, unknown> = { final: {}, snapshot: null };

  get(name: string): unknown {
    return this.traits[name];
  }

  on(name: string, handler: Handler): void {
    this.handlers.set(name, [...(this.handlers.get(name) ?? []), handler]);
  }

  off(name: string, handler: Handler): void {
    this.handlers.set(
      name,
      (this.handlers.get(name) ?? []).filter(known => known !== handler)
    );
  }

  send(content: unknown): void {
    this.sent.push(content);
  }

  emit(name: string, ...values: unknown[]): void {
    for (const handler of this.handlers.get(name) ?? []) {
      handler(...values);
    }
  }

  get numHandlers(): number {
    return [...this.handlers.values()].flat().length;
  }

  private readonly handlers = new Map<string, Handler[]>();
}

function start(traits: Record<string, unknown> = {}) {
  const model = new FakeModel();
  Object.assign(model.traits, traits);
  const stopped = new AbortController();
  const widget = define();
  const props = { model, el: document.createElement('div'), signal: stopped.signal };
  document.body.append(props.el);
  widget.initialize(props as unknown as Parameters<typeof widget.initialize>[0]);
  widget.render(props as unknown as Parameters<typeof widget.render>[0]);
  const points = () => props.el.querySelector<HTMLElement>('.accel-nb-panel')?.dataset.points;
  const receive = (base: number, extra: Record<string, unknown> = {}) => {
    const { content, buffer } = stepMessage(base, [[base + 1, 0.5, 0.1, 5]], extra);
    model.emit('msg:custom', content, [buffer]);
  };
  return { model, stopped, points, receive, el: props.el };
}

/** What the kernel answers when somebody looks at a part of the loss. */
function detail(steps: number[], { first, last }: { first: number; last: number }): unknown[] {
  const { content, buffer } = stepMessage(
    0,
    steps.map(step => [step, 0.5, 0.1, 5])
  );
  const { version, blocks } = content;
  return [{ kind: 'detail', version, blocks, table: 'step', name: '', first, last }, [buffer]];
}

describe('the widget', () => {
  beforeEach(() => {
    vi.useFakeTimers({ toFake: ['requestAnimationFrame', 'cancelAnimationFrame'] });
  });

  afterEach(() => {
    vi.useRealTimers();
  });

  it('accumulates the deltas of a run from its start', () => {
    const { points, receive, model } = start();
    receive(0);
    receive(1);
    expect(points()).toBe('2');
    expect(model.sent).toHaveLength(1); // the greeting, which a kernel that has sent nothing ignores
  });

  it('requests a snapshot when it is opened during a run, and continues from it', () => {
    const { points, receive, model } = start();
    receive(5, { kind: 'snapshot' });
    receive(8);
    receive(9);
    expect(points()).toBe('1');
    expect(model.sent).toHaveLength(2); // one more request, however many deltas are missed
    receive(10, { kind: 'snapshot' });
    receive(11);
    expect(points()).toBe('2');
  });

  it('inserts rows of a detail answer between existing ones', () => {
    const { model, points, receive } = start();
    receive(0);
    receive(4);
    model.emit('msg:custom', ...detail([2, 3, 4], { first: 1, last: 4 }));
    expect(points()).toBe('1'); // the newest is 1 so far: 2 to 4 come by themselves
    receive(0, { kind: 'snapshot', seq: 4 });
    receive(4);
    expect(points()).toBe('2');
    model.emit('msg:custom', ...detail([1, 2, 3, 4, 5], { first: 1, last: 5 }));
    expect(points()).toBe('5');
  });

  it('keeps the focus on a small chart while it draws', () => {
    const { el, receive, stopped } = start();
    receive(0, { kind: 'snapshot' });
    vi.advanceTimersToNextFrame();
    const plot = el.querySelector<HTMLElement>('.accel-nb-is-small .accel-nb-plot')!;
    plot.focus();
    receive(1);
    vi.advanceTimersToNextFrame();
    expect(document.activeElement).toBe(plot);
    stopped.abort();
  });

  it('draws a saved notebook from its traits', () => {
    const { content, buffer } = stepMessage(3, [[1, 0.5, 0.1, 5]], { kind: 'snapshot' });
    const { points, model } = start({ final: content, snapshot: buffer });
    expect(points()).toBe('1');
    expect(model.sent).toHaveLength(0);
  });

  it('sends the actions of the user', () => {
    const { el, model, receive } = start();
    receive(0);
    const stop = [...el.querySelectorAll('button')].find(
      button => button.textContent === 'stop after step'
    );
    stop?.click();
    expect(model.sent.at(-1)).toEqual({ kind: 'control', version: 1, action: { kind: 'stop' } });
  });

  it('draws the chosen earlier runs', () => {
    const hostile = '<img src=x onerror=alert(1)>';
    const { el, model, receive } = start();
    receive(0);
    const button = (label: string) =>
      [...el.querySelectorAll('button')].find(item => item.textContent === label)!;
    vi.runAllTimers();
    expect(button('compare').hidden).toBe(true); // there is none
    receive(1, { facts: { ...FACTS, num_earlier: 1 } });
    vi.runAllTimers();
    expect(button('compare').hidden).toBe(false);
    button('compare').click();
    expect(model.sent.at(-1)).toEqual({ kind: 'earlier', version: 1 });
    const runs = [{ run: 4, title: hostile, summary: '20 steps' }];
    model.emit('msg:custom', { kind: 'earlier', version: 1, blocks: [], runs }, []);
    vi.runAllTimers();
    const list = el.querySelector('.accel-nb-earlier')!;
    expect(list.querySelector('img')).toBeNull();
    expect(list.textContent).toContain(hostile);
    const box = list.querySelector('input')!;
    box.checked = true;
    box.dispatchEvent(new Event('change'));
    vi.runAllTimers();
    expect(model.sent.at(-1)).toEqual({
      kind: 'earlier',
      version: 1,
      run: 4,
      table: 'step',
      name: ''
    });
  });

  it('requests a memory snapshot if the device has an allocator', () => {
    const { el, model, receive } = start();
    const button = () =>
      [...el.querySelectorAll('button')].find(item => item.textContent === 'blocks')!;
    receive(0);
    vi.runAllTimers();
    expect(button().hidden).toBe(true);
    const ranks = [{ rank: 0, device: 'cuda:0', step_ms: 5, is_straggler: false }];
    receive(1, { facts: { ...FACTS, ranks } });
    vi.runAllTimers();
    expect(button().hidden).toBe(false);
    button().click();
    expect(model.sent.at(-1)).toEqual({
      kind: 'control',
      version: 1,
      action: { kind: 'memory_snapshot' }
    });
    receive(2, { facts: { ...FACTS, ranks, status: 'done' } });
    vi.runAllTimers();
    expect(button().hidden).toBe(true);
  });

  it('survives forged messages and traits', () => {
    const warn = vi.spyOn(console, 'warn').mockImplementation(() => undefined);
    const { model, points } = start({ final: { kind: 'snapshot', facts: '<img>' }, snapshot: null });
    model.emit('msg:custom', { kind: 'delta' }, []);
    model.emit('msg:custom', null, []);
    expect(points()).toBe('0');
    expect(warn).toHaveBeenCalledTimes(3);
    warn.mockRestore();
  });

  it('removes its nodes and listeners', () => {
    const { model, stopped, el } = start();
    expect(model.numHandlers).toBe(2);
    stopped.abort();
    expect(model.numHandlers).toBe(0);
    expect(el.querySelector('.accel-nb-panel')).toBeNull();
  });
});

describe('the notification of the end', () => {
  class FakeNotification {
    static permission = 'default';
    static answer = 'granted';
    static shown: { title: string; body: string }[] = [];
    static requestPermission = () => {
      FakeNotification.permission = FakeNotification.answer;
      return Promise.resolve(FakeNotification.permission);
    };
    constructor(title: string, { body }: { body: string }) {
      FakeNotification.shown.push({ title, body });
    }
  }

  beforeEach(() => {
    FakeNotification.shown = [];
    FakeNotification.permission = 'default';
    FakeNotification.answer = 'granted';
    vi.stubGlobal('Notification', FakeNotification);
  });
  afterEach(() => {
    vi.unstubAllGlobals();
    vi.restoreAllMocks();
  });

  const button = (el: HTMLElement) =>
    [...el.querySelectorAll('button')].find(found => found.textContent === 'notify')!;
  const settle = () => new Promise(resolve => setTimeout(resolve));
  const done = { facts: { ...FACTS, status: 'done' } };

  it('is shown once for a hidden page, if it is enabled', async () => {
    const { receive, el, stopped } = start();
    receive(0);
    button(el).click();
    await settle();
    vi.spyOn(document, 'hidden', 'get').mockReturnValue(true);
    receive(1);
    expect(FakeNotification.shown).toEqual([]);
    receive(2, done);
    receive(3, done);
    expect(FakeNotification.shown).toHaveLength(1);
    expect(FakeNotification.shown[0]?.title).toBe('run: done');
    stopped.abort();
    const later = start();
    expect(button(later.el).getAttribute('aria-pressed')).toBe('true');
    later.stopped.abort();
  });

  it('is not shown on a visible page, without permission, or for a run that had ended', async () => {
    const { receive, el, stopped } = start();
    button(el).click();
    await settle();
    receive(0);
    receive(1, done);
    vi.spyOn(document, 'hidden', 'get').mockReturnValue(true);
    receive(2, done);
    FakeNotification.answer = 'denied';
    button(el).click();
    button(el).click();
    await settle();
    expect(button(el).getAttribute('aria-pressed')).toBe('false');
    expect(FakeNotification.shown).toEqual([]);
    stopped.abort();
  });
});
