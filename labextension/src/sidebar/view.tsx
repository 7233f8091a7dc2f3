/** What the sidebar draws for each state of the channel. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { ChannelState } from '../channel';
import { formatBytes } from '../chart/format';
import { rankColour } from '../chart/palette';
import { optionLines } from '../model/options';
import type { ISidebarState } from '../model/sidebarState';

export interface ISidebarViewProps {
  readonly state: ChannelState;
  readonly trans: TranslationBundle;
  readonly onRun: (code: string) => void;
  readonly onRefresh: () => void;
}

export function SidebarView(props: ISidebarViewProps): React.JSX.Element {
  return (
    <div className="accel-nb-sidebar-content" data-state={props.state.kind}>
      <Kernel {...props} />
      <Options trans={props.trans} />
    </div>
  );
}

function Kernel({ state, trans, onRun, onRefresh }: ISidebarViewProps): React.JSX.Element {
  switch (state.kind) {
    case 'no-kernel':
      return <p className="accel-nb-hint">{trans.__('Open a notebook with a running kernel.')}</p>;
    case 'connecting':
      return <p className="accel-nb-hint">{trans.__('Waiting for the kernel …')}</p>;
    case 'not-loaded':
      return (
        <>
          <p className="accel-nb-hint">
            {trans.__(
              'The extension is not loaded in this kernel. Loading it changes nothing in your notebook.'
            )}
          </p>
          <div className="accel-nb-actions">
            <Action
              isMain
              label={trans.__('Load accel_nb')}
              onClick={() => onRun('%load_ext accel_nb')}
            />
            <Action label={trans.__('Check again')} onClick={onRefresh} />
          </div>
        </>
      );
    case 'ready':
      return <Ready info={state.info} trans={trans} onRun={onRun} onRefresh={onRefresh} />;
  }
}

function Ready({
  info,
  trans,
  onRun,
  onRefresh
}: Omit<ISidebarViewProps, 'state'> & { readonly info: ISidebarState }): React.JSX.Element {
  return (
    <>
      <section>
        <h3>{trans.__('Devices')}</h3>
        <ul className="accel-nb-lines">
          {info.devices.map((device, index) => (
            <li key={index}>
              <span className="accel-nb-line-main">{device.name}</span>
              <span className="accel-nb-line-side">
                {device.totalBytes > 0 ? formatBytes(device.totalBytes) : ''}
              </span>
            </li>
          ))}
        </ul>
      </section>
      <section>
        <h3>{trans.__('Workers')}</h3>
        <p className="accel-nb-pool" data-pool={info.pool}>
          {info.pool}
        </p>
        <ul className="accel-nb-lines">
          {info.workers.map(worker => (
            <li key={worker.rank}>
              <span className="accel-nb-line-main">
                <span
                  className="accel-nb-line-dot"
                  style={{ background: rankColour(worker.rank) }}
                />
                {trans.__('rank %1', worker.rank)}
              </span>
              <span className="accel-nb-line-side">
                {trans.__('%1, pid %2', worker.device, worker.pid)}
              </span>
            </li>
          ))}
        </ul>
        {info.notes.map((note, index) => (
          <p className="accel-nb-hint" key={index}>
            {note}
          </p>
        ))}
        <div className="accel-nb-actions">
          <Action label={trans.__('Refresh')} onClick={onRefresh} />
          <Action label={trans.__('Restart')} onClick={() => onRun('%accelerate restart')} />
          <Action label={trans.__('Stop')} onClick={() => onRun('%accelerate stop')} />
        </div>
      </section>
    </>
  );
}

function Options({ trans }: { readonly trans: TranslationBundle }): React.JSX.Element {
  return (
    <details className="accel-nb-options">
      <summary>{trans.__('Options of a run')}</summary>
      <dl>
        {optionLines().map(option => (
          <div key={option.flag}>
            <dt>
              <code>{option.flag}</code>
              <span className="accel-nb-line-side">{option.defaultText}</span>
            </dt>
            <dd>{option.unit ? `${option.description} [${option.unit}]` : option.description}</dd>
          </div>
        ))}
      </dl>
    </details>
  );
}

function Action({
  label,
  onClick,
  isMain = false
}: {
  readonly label: string;
  readonly onClick: () => void;
  readonly isMain?: boolean;
}): React.JSX.Element {
  const className = isMain ? 'jp-mod-styled jp-mod-accept' : 'jp-mod-styled';
  return (
    <button className={className} type="button" onClick={onClick}>
      {label}
    </button>
  );
}
