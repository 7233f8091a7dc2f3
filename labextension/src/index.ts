/** The JupyterLab plugins of accel_nb. */

import {
  ILayoutRestorer,
  type JupyterFrontEnd,
  type JupyterFrontEndPlugin
} from '@jupyterlab/application';
import { ICommandPalette } from '@jupyterlab/apputils';
import { INotebookTracker } from '@jupyterlab/notebook';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { addCommands } from './commands';
import { showSavedPictures } from './savedPicture';
import { accelIcon } from './sidebar/icon';
import { NotebookSessions } from './sidebar/sessions';
import { Sidebar } from './sidebar/sidebar';
import { StatusItem } from './sidebar/statusItem';

const PLUGIN_ID = 'accel-nb:sidebar';

const sidebar: JupyterFrontEndPlugin<void> = {
  id: PLUGIN_ID,
  description: "Shows the devices, workers and options of the current notebook's kernel.",
  autoStart: true,
  requires: [INotebookTracker],
  optional: [ITranslator, ILayoutRestorer, ICommandPalette, IStatusBar, ISettingRegistry],
  activate: (
    app: JupyterFrontEnd,
    tracker: INotebookTracker,
    translator: ITranslator | null,
    restorer: ILayoutRestorer | null,
    palette: ICommandPalette | null,
    statusBar: IStatusBar | null,
    settings: ISettingRegistry | null
  ) => {
    const trans = (translator ?? nullTranslator).load('accel_nb');
    const sessions = new NotebookSessions(tracker);
    tracker.widgetAdded.connect((_, panel) => {
      // Runs after the widget manager has registered its renderer, and before outputs are rendered.
      queueMicrotask(() => showSavedPictures(panel.content.rendermime));
    }, sessions);
    const panel = new Sidebar(sessions, trans, translator ?? nullTranslator);
    panel.id = 'accel-nb-sidebar';
    panel.title.icon = accelIcon;
    panel.title.caption = trans.__('Accelerated training');
    app.shell.add(panel, 'right', { rank: 600 });
    restorer?.add(panel, panel.id);

    const open = (): void => app.shell.activateById(panel.id);
    addCommands(app.commands, palette, sessions, trans, open);

    const item = new StatusItem(sessions, trans, open);
    let isWanted = true;
    statusBar?.registerStatusItem(PLUGIN_ID, {
      item,
      align: 'left',
      rank: 80,
      isActive: () => isWanted && item.isActive,
      activeStateChanged: sessions.changed
    });

    const follow = (loaded: ISettingRegistry.ISettings): void => {
      isWanted = loaded.get('showStatus').composite !== false;
      sessions.followsForecast = loaded.get('followForecast').composite !== false;
    };
    void settings?.load(PLUGIN_ID).then(loaded => {
      follow(loaded);
      loaded.changed.connect(follow);
    });
  }
};

export default [sidebar];
