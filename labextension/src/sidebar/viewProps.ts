/** Props that every view of the sidebar has. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { NotebookSession } from './session';

export interface IViewProps {
  readonly session: NotebookSession;
  readonly trans: TranslationBundle;
}
