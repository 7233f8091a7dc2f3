/** The JupyterLab plugins of accel_nb. */

import {
  ILayoutRestorer,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { INotebookTracker, NotebookActions } from '@jupyterlab/notebook';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { accelIcon } from './sidebar/icon';
import { Sidebar } from './sidebar/sidebar';

const sidebar: JupyterFrontEndPlugin<void> = {
  id: 'accel-nb:sidebar',
  description: "Shows the devices, workers and options of the current notebook's kernel.",
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ITranslator, ILayoutRestorer],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    translator: ITranslator | null,
    restorer: ILayoutRestorer | null
  ) => {
    const trans = (translator ?? nullTranslator).load('accel_nb');
    const panel = new Sidebar(tracker, trans);
    panel.id = 'accel-nb-sidebar';
    panel.title.icon = accelIcon;
    panel.title.caption = trans.__('Accelerated training');
    NotebookActions.executed.connect((_, { notebook, cell }) => {
      panel.onExecuted(notebook, cell.model.sharedModel.getSource());
    }, panel);
    app.shell.add(panel, 'right', { rank: 600 });
    restorer?.add(panel, panel.id);
  }
};

export default [sidebar];
