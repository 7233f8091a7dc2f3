/** A notification of the browser when a run ends while its page is hidden, if the user has allowed it. */

import { formatNumber, formatSeconds } from '../chart/format';
import type { IFacts } from '../model/protocol';
import { toggleButton } from './dom';

export class EndNotification {
  constructor(signal: AbortSignal) {
    this.node = toggleButton(
      'notify',
      'Show a notification of the browser if a run ends while this page is hidden',
      isOn => void this.set(isOn),
      signal
    );
    // Browsers refuse notifications to pages without encryption and to frames of other sites.
    this.node.hidden = typeof Notification === 'undefined' || Notification.permission === 'denied';
    if (!this.node.hidden && Notification.permission === 'granted') {
      this.node.setAttribute('aria-pressed', 'true');
    }
  }

  readonly node: HTMLButtonElement;

  /** Notify if the run has ended since the last call. */
  update(facts: IFacts): void {
    const hasEnded = this.wasRunning && facts.status !== 'running';
    this.wasRunning = facts.status === 'running';
    if (hasEnded && document.hidden && this.node.getAttribute('aria-pressed') === 'true') {
      // Views of one run have one tag: the browser shows one notification.
      new Notification(`${facts.title}: ${facts.status}`, {
        body: bodyOf(facts),
        tag: facts.title
      });
    }
  }

  private async set(isOn: boolean): Promise<void> {
    const isAllowed = isOn && (await Notification.requestPermission()) === 'granted';
    this.node.setAttribute('aria-pressed', String(isAllowed));
  }

  private wasRunning = false;
}

function bodyOf(facts: IFacts): string {
  const parts = facts.losses.slice(0, 2).map(({ name, value }) => `${name} ${formatNumber(value)}`);
  if (facts.elapsedS !== null) {
    parts.push(`after ${formatSeconds(Math.round(facts.elapsedS))}`);
  }
  return parts.join(', ');
}
