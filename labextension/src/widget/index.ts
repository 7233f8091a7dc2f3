/** The anywidget entry point. The data is in the model, so views can be created and removed. */

import type { AnyModel, InitializeProps, RenderProps } from '@anywidget/types';
import uPlotStyle from 'uplot/dist/uPlot.min.css';
import { PANEL_VERSION } from '../generated/messages';
import { isAnswer, parseAnswer } from '../model/answers';
import { PanelModel } from '../model/panelModel';
import { parseMessage, ProtocolError } from '../model/protocol';
import { showPanel } from './panelView';
import panelStyle from './widget.css';

/** Synchronized traits: empty while the cell runs, and the final snapshot message after it has ended. */
interface ITraits extends Record<string, unknown> {
  final: unknown;
  snapshot: DataView | null;
}

/** Called by anywidget once for each model. */
export default function define() {
  const panel = new PanelModel();
  return {
    initialize({ model, signal }: InitializeProps<ITraits>): void {
      listen(panel, model, signal);
    },
    render({ model, el, signal }: RenderProps<ITraits>): void {
      const style = document.createElement('style');
      style.textContent = `${uPlotStyle}\n${panelStyle}`;
      el.append(style);
      showPanel(
        panel,
        el,
        action => model.send({ kind: 'control', version: PANEL_VERSION, action }),
        signal
      );
    }
  };
}

/** Update `panel` by the model's messages and traits; request a snapshot if a message is missing. */
function listen(panel: PanelModel, model: AnyModel<ITraits>, signal: AbortSignal): void {
  let isAwaitingSnapshot = false;
  const resync = () => {
    if (!isAwaitingSnapshot) {
      isAwaitingSnapshot = true;
      const page = panel.facts === null ? panel.page : '';
      model.send({ kind: 'resync', version: PANEL_VERSION, seq: panel.seq, page });
    }
  };
  const receive = (content: unknown, buffers: readonly ArrayBufferView[]) => {
    try {
      if (isAnswer(content)) {
        panel.applyAnswer(parseAnswer(content, buffers));
        return;
      }
      const message = parseMessage(content, buffers);
      isAwaitingSnapshot = isAwaitingSnapshot && message.kind !== 'snapshot';
      if (!panel.apply(message)) {
        resync();
      }
    } catch (error) {
      if (!(error instanceof ProtocolError)) {
        throw error;
      }
      console.warn(`accel_nb: dropped a message: ${error.message}`);
    }
  };
  const readTraits = () => {
    const final = model.get('final');
    const snapshot = model.get('snapshot');
    if (typeof final === 'object' && final !== null && 'kind' in final) {
      receive(final, snapshot ? [snapshot] : []);
    }
  };
  const onMessage = (content: unknown, buffers: DataView[]) => receive(content, buffers);
  panel.query = query => model.send({ ...query, version: PANEL_VERSION });

  model.on('msg:custom', onMessage);
  model.on('change:final', readTraits);
  signal.addEventListener('abort', () => {
    model.off('msg:custom', onMessage);
    model.off('change:final', readTraits);
  });
  readTraits();
  if (panel.facts === null) {
    resync();
  }
}
