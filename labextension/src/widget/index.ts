/** The anywidget entry: the data lives with the model, views come and go. */

import type { AnyModel, InitializeProps, RenderProps } from '@anywidget/types';
import uPlotStyle from 'uplot/dist/uPlot.min.css';
import { PANEL_VERSION } from '../generated/messages';
import { isAnswer, parseAnswer } from '../model/answers';
import { PanelModel } from '../model/panelModel';
import { parseMessage, ProtocolError } from '../model/protocol';
import { showPanel } from './panelView';
import panelStyle from './widget.css';

/** What the kernel's widget synchronises: empty while a cell runs, one whole snapshot message once it has ended. */
interface ITraits extends Record<string, unknown> {
  final: unknown;
  snapshot: DataView | null;
}

/** anywidget calls this once for each model. */
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

/** Feed `panel` from the model's messages and traits; ask for a snapshot when something is missing. */
function listen(panel: PanelModel, model: AnyModel<ITraits>, signal: AbortSignal): void {
  let isWaiting = false;
  const resync = () => {
    if (!isWaiting) {
      isWaiting = true;
      model.send({ kind: 'resync', version: PANEL_VERSION, seq: panel.seq });
    }
  };
  const take = (content: unknown, buffers: readonly ArrayBufferView[]) => {
    try {
      if (isAnswer(content)) {
        panel.take(parseAnswer(content, buffers));
        return;
      }
      const message = parseMessage(content, buffers);
      isWaiting = isWaiting && message.kind !== 'snapshot';
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
  const takeTraits = () => {
    const final = model.get('final');
    const snapshot = model.get('snapshot');
    if (typeof final === 'object' && final !== null && 'kind' in final) {
      take(final, snapshot ? [snapshot] : []);
    }
  };
  const onMessage = (content: unknown, buffers: DataView[]) => take(content, buffers);
  panel.query = query => model.send({ ...query, version: PANEL_VERSION });

  model.on('msg:custom', onMessage);
  model.on('change:final', takeTraits);
  signal.addEventListener('abort', () => {
    model.off('msg:custom', onMessage);
    model.off('change:final', takeTraits);
  });
  takeTraits();
  if (panel.facts === null) {
    resync();
  }
}
