/** The state of the notebook's kernel: its devices and workers, or the reason why they are unknown. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { capText, formatBytes, formatCount, formatNumber, formatSeconds } from '../chart/format';
import { rankColor } from '../chart/palette';
import type { IDeviceLine, IRunLine, ISidebarState } from '../model/sidebarState';
import { Action, Bar, Hints, Section } from './parts';
import { poolText } from './poolText';
import type { IViewProps } from './viewProps';

export function KernelView({ session, trans }: IViewProps): React.JSX.Element {
  const { state } = session.channel;
  switch (state.kind) {
    case 'no-kernel':
      return <p className="accel-nb-hint">{trans.__('The notebook has no running kernel.')}</p>;
    case 'connecting':
      return <p className="accel-nb-hint">{trans.__('Waiting for the kernel …')}</p>;
    case 'foreign':
      return (
        <p className="accel-nb-hint">
          {state.reason === 'language'
            ? trans.__('This kernel does not run Python.')
            : trans.__(
                'Another notebook of this page uses the same kernel: select it to see the workers.'
              )}
        </p>
      );
    case 'not-loaded':
      return (
        <>
          <p className="accel-nb-hint">
            {trans.__(
              'The extension is not loaded in this kernel. Loading it changes nothing in your notebook.'
            )}
          </p>
          <div className="accel-nb-actions">
            <Action isMain label={trans.__('Load accel_nb')} onClick={() => void session.load()} />
            <Action label={trans.__('Check again')} onClick={() => session.channel.refresh()} />
          </div>
          <Hints isProblem texts={session.error === '' ? [] : [session.error]} />
        </>
      );
    case 'ready':
      return <Ready info={state.info} session={session} trans={trans} />;
  }
}

function Ready({
  info,
  session,
  trans
}: IViewProps & { readonly info: ISidebarState }): React.JSX.Element {
  const isBusy = info.pool === 'busy';
  const hasWorkers = info.workers.length > 0;
  return (
    <>
      <Section title={trans.__('Devices')}>
        <ul className="accel-nb-lines">
          {info.devices.map((device, index) => (
            <li key={index}>
              <Device device={device} trans={trans} />
            </li>
          ))}
        </ul>
      </Section>
      <Section
        title={trans.__('Workers')}
        aside={
          <span className="accel-nb-pool" data-pool={info.pool}>
            {poolText(info.pool, trans)}
          </span>
        }
      >
        {info.run !== null && <Running run={info.run} trans={trans} />}
        <ul className="accel-nb-lines">
          {info.workers.map(worker => (
            <li key={worker.rank}>
              <div className="accel-nb-line" title={trans.__('process %1', worker.pid)}>
                <span className="accel-nb-line-main">
                  <span
                    className="accel-nb-line-dot"
                    style={{ background: rankColor(worker.rank) }}
                  />
                  {trans.__('rank %1', worker.rank)}
                </span>
                <span className="accel-nb-line-side">
                  {worker.device}
                  {worker.memoryBytes > 0 && ` · ${formatBytes(worker.memoryBytes)}`}
                </span>
              </div>
            </li>
          ))}
        </ul>
        <Hints texts={info.notes} />
        <div className="accel-nb-actions">
          {isBusy ? (
            <Action isMain label={trans.__('Interrupt')} onClick={() => void session.interrupt()} />
          ) : (
            <Action
              label={trans.__('Start')}
              isDisabled={hasWorkers && info.pool === 'ready'}
              onClick={() => void session.start()}
            />
          )}
          <Action label={trans.__('Restart')} onClick={() => void session.restart()} />
          <Action label={trans.__('Stop')} onClick={() => void session.stop()} />
        </div>
        <Hints isProblem texts={session.error === '' ? [] : [session.error]} />
      </Section>
    </>
  );
}

/** The cell that is running: how far it is, and its losses. */
function Running({
  run,
  trans
}: {
  readonly run: IRunLine;
  readonly trans: TranslationBundle;
}): React.JSX.Element {
  const parts = [trans.__('step %1', formatCount(run.step))];
  parts.push(...run.losses.map(({ name, value }) => `${capText(name, 24)} ${formatNumber(value)}`));
  if (run.remainingS !== null) {
    parts.push(trans.__('%1 left', formatSeconds(Math.round(run.remainingS))));
  }
  return (
    <div className="accel-nb-running" data-step={run.step}>
      <div className="accel-nb-line">
        <span className="accel-nb-line-main" title={run.title}>
          {run.title}
        </span>
        <span className="accel-nb-line-side">
          {run.fraction === null ? '' : `${Math.round(100 * run.fraction)} %`}
        </span>
      </div>
      {run.fraction !== null && (
        <Bar
          label={trans.__('Progress of the run')}
          parts={[{ label: '', share: run.fraction, color: 'var(--jp-brand-color1)' }]}
        />
      )}
      <div className="accel-nb-run-facts">
        {run.step > 0 ? parts.join(' · ') : trans.__('no step yet')}
      </div>
    </div>
  );
}

function Device({
  device,
  trans
}: {
  readonly device: IDeviceLine;
  readonly trans: TranslationBundle;
}): React.JSX.Element {
  const used = Math.max(0, device.totalBytes - device.freeBytes);
  const text = trans.__('%1 of %2 in use', formatBytes(used), formatBytes(device.totalBytes));
  return (
    <>
      <div className="accel-nb-line">
        <span className="accel-nb-line-main" title={device.name}>
          {device.name}
        </span>
        <span className="accel-nb-line-side">
          {device.totalBytes > 0 ? formatBytes(device.totalBytes) : ''}
        </span>
      </div>
      {device.totalBytes > 0 && device.freeBytes > 0 && (
        <Bar
          label={text}
          parts={[
            { label: text, share: used / device.totalBytes, color: 'var(--jp-brand-color1)' }
          ]}
        />
      )}
    </>
  );
}
