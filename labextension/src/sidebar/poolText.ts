/** Texts of the states of the pool. */

import type { TranslationBundle } from '@jupyterlab/translation';

/** The translated text of a pool state; an unknown state is returned unchanged. */
export function poolText(state: string, trans: TranslationBundle): string {
  const texts: Readonly<Record<string, string>> = {
    'not started': trans.__('not started'),
    'warming up': trans.__('warming up'),
    warm: trans.__('no workers'),
    starting: trans.__('starting'),
    ready: trans.__('ready'),
    busy: trans.__('busy'),
    failed: trans.__('failed'),
    closed: trans.__('ended')
  };
  return Object.prototype.hasOwnProperty.call(texts, state) ? (texts[state] ?? state) : state;
}
