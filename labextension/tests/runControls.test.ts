import { describe, expect, it } from 'vitest';
import { parseMessage } from '../src/model/protocol';
import { RunControls, type Action } from '../src/widget/runControls';
import { FACTS, stepMessage } from './messages';

function start(facts: Record<string, unknown> = {}) {
  const sent: Action[] = [];
  const controls = new RunControls(action => sent.push(action), new AbortController().signal);
  const show = (changed: Record<string, unknown>) => {
    const { content, buffer } = stepMessage(0, [], { facts: { ...FACTS, ...changed } });
    controls.update(parseMessage(content, [buffer]).facts);
  };
  show(facts);
  const button = (label: string) => {
    const found = [...controls.node.querySelectorAll('button')].find(
      item => item.textContent === label
    );
    if (found === undefined) {
      throw new Error(`no button ${label}`);
    }
    return found;
  };
  const input = controls.node.querySelector('input') as HTMLInputElement;
  return { node: controls.node, sent, show, button, input };
}

describe('RunControls', () => {
  it('sends one action for each control', () => {
    const { sent, button, input, node } = start({ can_save: true });
    for (const label of ['stop after step', 'interrupt', 'checkpoint now', '÷ 2']) {
      button(label).click();
    }
    input.value = ' 3e-4 ';
    input.dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }));
    const select = node.querySelector('select') as HTMLSelectElement;
    select.value = '100';
    select.dispatchEvent(new Event('change'));
    expect(sent).toEqual([
      { kind: 'stop' },
      { kind: 'interrupt' },
      { kind: 'checkpoint' },
      { kind: 'scale_rate', factor: 0.5 },
      { kind: 'set_rate', value: 3e-4 },
      { kind: 'interval', steps: 100 }
    ]);
  });

  it('marks text that is no learning rate as invalid and keeps it', () => {
    const { sent, button, input } = start();
    for (const text of ['', 'fast', '-1', '0', '1e999']) {
      input.value = text;
      button('set').click();
      expect(input.getAttribute('aria-invalid')).toBe('true');
    }
    expect(sent).toEqual([]);
  });

  it('enables saving only if there is a checkpoint folder', () => {
    const { button, show } = start();
    expect(button('checkpoint now').disabled).toBe(true);
    expect(button('checkpoint now').title).toContain('--checkpoint');
    show({ can_save: true });
    expect(button('checkpoint now').disabled).toBe(false);
  });

  it('is shown only while the kernel accepts actions, and keeps the last result as text', () => {
    const { node, show } = start({ accepts_actions: false });
    expect(node.hidden).toBe(true);
    show({ status: 'done', accepts_actions: false, action_result: '<b>stopped</b>' });
    expect(node.hidden).toBe(false);
    expect(node.querySelector('b')).toBeNull();
    expect(node.textContent).toContain('<b>stopped</b>');
    expect([...node.querySelectorAll('button')].every(item => item.closest('[hidden]'))).toBe(true);
  });

  it('does not pass typed keys on to the notebook', () => {
    const { input, node } = start();
    let heard = 0;
    node.addEventListener('keydown', () => (heard += 1));
    input.dispatchEvent(new KeyboardEvent('keydown', { key: 'a', bubbles: true }));
    expect(heard).toBe(0);
  });
});
