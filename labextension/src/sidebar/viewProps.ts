/** Props of every view of the sidebar. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { NotebookSession } from './session';

export interface IViewProps {
  readonly session: NotebookSession;
  readonly trans: TranslationBundle;
}
