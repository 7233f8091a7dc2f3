/** Controls of a running cell. The kernel checks every action again: `accel_nb/telemetry/actions.py`. */

import type { Action as RunAction } from '../generated/messages';
import type { IFacts } from '../model/protocol';
import { actionButton, chooser, element, setText } from './dom';

/** An action of the training loop, or an interrupt of the cell. */
export type Action = RunAction | { readonly kind: 'interrupt' };

const INTERVALS = [1, 10, 100, 1000].map(steps => ({
  value: String(steps),
  label: steps === 1 ? 'log every step' : `log every ${steps}`
}));

/** A row of controls, shown while the kernel accepts actions. */
export class RunControls {
  constructor(send: (action: Action) => void, signal: AbortSignal) {
    this.save = actionButton(
      'checkpoint now',
      SAVE_HINT,
      () => send({ kind: 'checkpoint' }),
      signal
    );
    this.rate.type = 'text';
    this.rate.inputMode = 'decimal';
    this.rate.placeholder = 'rate';
    this.rate.setAttribute('aria-label', 'New learning rate');
    this.rate.addEventListener(
      'keydown',
      event => {
        event.stopPropagation(); // the notebook binds single keys to commands
        if (event.key === 'Enter') {
          this.setRate(send);
        }
      },
      { signal }
    );
    this.rate.addEventListener('input', () => this.rate.removeAttribute('aria-invalid'), {
      signal
    });
    const rates = element(
      'span',
      'accel-nb-setting',
      element('span', 'accel-nb-setting-label', 'learning rate'),
      actionButton(
        '÷ 2',
        'Halve the learning rate',
        () => send({ kind: 'scale_rate', factor: 0.5 }),
        signal
      ),
      actionButton(
        '× 2',
        'Double the learning rate',
        () => send({ kind: 'scale_rate', factor: 2 }),
        signal
      ),
      this.rate,
      actionButton('set', 'Set the learning rate', () => this.setRate(send), signal)
    );
    this.node = element(
      'div',
      'accel-nb-run-controls',
      actionButton(
        'stop after step',
        'End the cell after this step and keep its training so far',
        () => send({ kind: 'stop' }),
        signal
      ),
      actionButton(
        'interrupt',
        'Interrupt the cell at once',
        () => send({ kind: 'interrupt' }),
        signal
      ),
      this.save,
      rates,
      chooser(
        'How often steps are reported',
        INTERVALS,
        value => send({ kind: 'interval', steps: Number(value) }),
        signal
      ),
      this.actionResult
    );
    // Otherwise JupyterLab's shortcuts on Enter, space and letters would take precedence over the controls.
    this.node.setAttribute('data-lm-suppress-shortcuts', 'true');
    this.node.setAttribute('role', 'group');
    this.node.setAttribute('aria-label', 'Run controls');
    this.actionResult.setAttribute('role', 'status');
    this.node.hidden = true;
  }

  readonly node: HTMLElement;

  update(facts: IFacts): void {
    const acceptsActions = facts.acceptsActions && facts.status === 'running';
    for (const control of this.node.children) {
      if (control !== this.actionResult) {
        (control as HTMLElement).hidden = !acceptsActions;
      }
    }
    this.node.hidden = !acceptsActions && facts.actionResult === '';
    this.save.disabled = !facts.canSave;
    this.save.title = facts.canSave ? SAVE_HINT : 'The cell was started without --checkpoint DIR';
    setText(this.actionResult, facts.actionResult);
  }

  private setRate(send: (action: Action) => void): void {
    const value = Number(this.rate.value);
    if (this.rate.value.trim() === '' || !Number.isFinite(value) || value <= 0) {
      this.rate.setAttribute('aria-invalid', 'true');
      return;
    }
    this.rate.value = '';
    send({ kind: 'set_rate', value });
  }

  private readonly save: HTMLButtonElement;
  private readonly rate = element('input', 'accel-nb-input');
  private readonly actionResult = element('span', 'accel-nb-action-result');
}

const SAVE_HINT = 'Save a checkpoint after this step';
