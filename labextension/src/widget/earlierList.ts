/** The runs to compare with, each with a box to tick. */

import { capText } from '../chart/format';
import { earlierColor } from '../chart/palette';
import type { EarlierRuns } from '../model/earlierRuns';
import { element, paintSwatch, setText } from './dom';

const MAX_TITLE = 60;

export class EarlierList {
  constructor(
    private readonly earlier: EarlierRuns,
    private readonly signal: AbortSignal
  ) {
    this.node = element('div', 'accel-nb-earlier', this.told, this.list);
    this.node.setAttribute('role', 'group');
    this.node.setAttribute('aria-label', 'Earlier runs');
    // JupyterLab's own command on space would take it from the boxes.
    this.node.setAttribute('data-lm-suppress-shortcuts', 'true');
    this.node.hidden = true;
  }

  readonly node: HTMLElement;

  update(): void {
    const { runs } = this.earlier;
    setText(
      this.told,
      runs === null ? 'waiting for the kernel, which keeps the earlier runs …' : 'compare with'
    );
    const shown = runs ?? [];
    const names = shown.map(run => run.run).join(' ');
    if (names !== this.names) {
      this.names = names;
      this.list.replaceChildren(...shown.map(run => this.makeBox(run.run, run.title, run.summary)));
    }
    for (const box of this.list.querySelectorAll('input')) {
      box.checked = this.earlier.isChosen(Number(box.value));
    }
  }

  private makeBox(run: number, title: string, summary: string): HTMLElement {
    const box = element('input', 'accel-nb-box');
    box.type = 'checkbox';
    box.value = String(run);
    box.addEventListener('change', () => this.earlier.choose(run, box.checked), {
      signal: this.signal
    });
    const swatch = element('span', 'accel-nb-swatch');
    paintSwatch(swatch, earlierColor(run), true);
    return element(
      'label',
      'accel-nb-earlier-run',
      box,
      swatch,
      element('span', 'accel-nb-earlier-title', capText(title, MAX_TITLE)),
      element('span', 'accel-nb-earlier-summary', summary)
    );
  }

  private names = '';
  private readonly told = element('span', 'accel-nb-field-label');
  private readonly list = element('span', 'accel-nb-earlier-list');
}
