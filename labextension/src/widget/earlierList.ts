/** The runs to compare with, each with a checkbox. */

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
    this.node = element('div', 'accel-nb-earlier', this.caption, this.list);
    this.node.setAttribute('role', 'group');
    this.node.setAttribute('aria-label', 'Earlier runs');
    // Otherwise JupyterLab's shortcut on space would take precedence over the checkboxes.
    this.node.setAttribute('data-lm-suppress-shortcuts', 'true');
    this.node.hidden = true;
  }

  readonly node: HTMLElement;

  update(): void {
    const { runs } = this.earlier;
    setText(
      this.caption,
      runs === null ? 'waiting for the list of runs from the kernel …' : 'compare with'
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
  private readonly caption = element('span', 'accel-nb-field-label');
  private readonly list = element('span', 'accel-nb-earlier-list');
}
