/**
 * Shows the saved picture of a panel whose kernel has ended. In a trusted notebook JupyterLab's widget renderer would
 * show "model not found", even if the output has other formats.
 */

import type { NotebookPanel } from '@jupyterlab/notebook';

type Rendermime = NotebookPanel['content']['rendermime'];
type Factory = NonNullable<ReturnType<Rendermime['getFactory']>>;
type Renderer = ReturnType<Factory['createRenderer']>;

const VIEW = 'application/vnd.jupyter.widget-view+json';
const PICTURE = 'image/png';

/** The rank of this renderer, lower than that of the widget renderer, so that it is preferred. */
const RANK = -10;

/** Register a widget renderer that shows the saved picture of a panel whose kernel has ended. */
export function showSavedPictures(rendermime: Rendermime): void {
  const views = rendermime.getFactory(VIEW);
  if (views !== undefined) {
    rendermime.addFactory(
      { ...views, createRenderer: options => withPicture(views.createRenderer(options)) },
      RANK
    );
  }
}

function withPicture(renderer: Renderer): Renderer {
  const render = renderer.renderModel.bind(renderer);
  renderer.renderModel = async model => {
    await render(model);
    const picture = model.data[PICTURE];
    const text = model.data['text/plain'];
    const isOurs = model.metadata['accel_nb'] === 'panel';
    const isLost = renderer.node.textContent?.startsWith('Error displaying widget') ?? false;
    if (isOurs && isLost && typeof picture === 'string') {
      const image = document.createElement('img');
      image.className = 'accel-nb-saved-picture';
      image.src = `data:${PICTURE};base64,${picture}`;
      image.alt = typeof text === 'string' ? text : '';
      renderer.node.replaceChildren(image);
    }
  };
  return renderer;
}
