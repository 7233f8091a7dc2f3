/** The memory forecast for the form's options: a bar for each plan, and the table of `%accelerate plan`. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { formatBytes, formatCount } from '../chart/format';
import type { IForecast, IPlan } from '../model/forecast';
import { Action, Bar, Hints, Section, type IBarPart } from './parts';
import type { IViewProps } from './viewProps';

const COLORS: Readonly<Record<string, string>> = {
  parameters: '#0072b2',
  gradients: '#e69f00',
  optimizer: '#009e73',
  activations: '#cc79a7',
  exchange: '#56b4e9',
  step: '#9a9a9a'
};

export function ForecastView({ session, trans }: IViewProps): React.JSX.Element {
  const { forecast } = session;
  const shown =
    forecast.kind === 'done'
      ? forecast.forecast
      : forecast.kind === 'running'
        ? forecast.last
        : null;
  return (
    <Section
      title={trans.__('Memory forecast')}
      aside={
        <span className="accel-nb-line-side">
          {forecast.kind === 'running' ? trans.__('computing …') : ''}
        </span>
      }
    >
      {forecast.kind === 'no-model' && (
        <p className="accel-nb-hint">
          {trans.__('The notebook has no model yet, or more than one.')}
        </p>
      )}
      {forecast.kind === 'failed' && <Hints isProblem texts={[forecast.error]} />}
      {shown !== null && <Plans forecast={shown} trans={trans} />}
      <div className="accel-nb-actions">
        <Action
          label={shown === null ? trans.__('Forecast') : trans.__('Forecast again')}
          isDisabled={forecast.kind === 'running'}
          onClick={() => void session.requestForecast()}
        />
      </div>
    </Section>
  );
}

function Plans({
  forecast,
  trans
}: {
  readonly forecast: IForecast;
  readonly trans: TranslationBundle;
}): React.JSX.Element {
  const plans = forecast.plans.filter(plan => plan.isSupported);
  const labels = Object.keys(COLORS).filter(label =>
    plans.some(plan => plan.parts.some(part => part.label === label))
  );
  return (
    <div className="accel-nb-forecast">
      <p className="accel-nb-hint">
        {trans.__(
          '%1: %2 parameters, %3, on %4 with at most %5 each',
          forecast.model,
          formatCount(forecast.numParameters),
          forecast.optimizer,
          forecast.devices,
          formatBytes(forecast.room)
        )}
      </p>
      <ul className="accel-nb-lines">
        {plans.map((plan, index) => (
          <li key={index} data-plan={plan.name}>
            <PlanBar plan={plan} forecast={forecast} trans={trans} />
          </li>
        ))}
      </ul>
      <ul className="accel-nb-legend-list">
        {labels.map(label => (
          <li key={label}>
            <span className="accel-nb-line-dot" style={{ background: COLORS[label] }} />
            {label}
          </li>
        ))}
      </ul>
      <p className="accel-nb-why">{forecast.why}</p>
      <Hints texts={forecast.notes} />
      <details className="accel-nb-group">
        <summary>{trans.__('Table')}</summary>
        <div className="accel-nb-table" tabIndex={0} role="region" aria-label={trans.__('Table')}>
          <table>
            <thead>
              <tr>
                <th scope="col">{trans.__('each rank')}</th>
                {labels.map(label => (
                  <th scope="col" key={label}>
                    {label}
                  </th>
                ))}
                <th scope="col">{trans.__('peak')}</th>
              </tr>
            </thead>
            <tbody>
              {forecast.plans.map((plan, index) => (
                <tr key={index}>
                  <th scope="row">{planName(plan, trans)}</th>
                  {labels.map(label => (
                    <td key={label}>
                      {formatBytes(plan.parts.find(part => part.label === label)?.bytes ?? 0)}
                    </td>
                  ))}
                  <td>{formatBytes(plan.peak)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </div>
  );
}

function PlanBar({
  plan,
  forecast,
  trans
}: {
  readonly plan: IPlan;
  readonly forecast: IForecast;
  readonly trans: TranslationBundle;
}): React.JSX.Element {
  const sum = plan.parts.reduce((total, part) => total + part.bytes, 0);
  const whole = Math.max(forecast.room, sum, 1);
  const parts: IBarPart[] = plan.parts.map(part => ({
    label: `${part.label}: ${formatBytes(part.bytes)}`,
    share: part.bytes / whole,
    color: COLORS[part.label] ?? '#9a9a9a'
  }));
  const verdict =
    plan.missing > 0 ? trans.__('needs %1 more', formatBytes(plan.missing)) : trans.__('fits');
  const name = planName(plan, trans);
  return (
    <>
      <div className="accel-nb-line">
        <span className="accel-nb-line-main">{name}</span>
        <span className="accel-nb-line-side" data-fits={plan.missing === 0}>
          {formatBytes(plan.peak)} · {verdict}
        </span>
      </div>
      <Bar
        parts={parts}
        limit={forecast.room / whole}
        label={trans.__('%1: peak %2, %3', name, formatBytes(plan.peak), verdict)}
      />
    </>
  );
}

function planName(plan: IPlan, trans: TranslationBundle): string {
  const name = plan.isSupported ? plan.name : `${plan.name} *`;
  return plan.isCheckpointed ? trans.__('%1, checkpointed', name) : name;
}
