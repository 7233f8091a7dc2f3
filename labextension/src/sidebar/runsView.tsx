/** The recent runs: outcome, last loss and a small chart of each; a click shows its details and options. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { useState } from 'react';
import { agoText, formatCount, formatNumber, formatSeconds } from '../chart/format';
import { sparkline } from '../chart/sparkline';
import { magicLine } from '../model/cellLine';
import type { IRecentRun, IRunDetails, Outcome, RunFact } from '../model/recentRuns';
import { Action, Hints, Section, Words } from './parts';
import type { IViewProps } from './viewProps';

const NUM_SHOWN = 5;
const CHART_WIDTH = 60;
const CHART_HEIGHT = 22;
const MARGIN = 3;

export function RunsView({ session, trans }: IViewProps): React.JSX.Element {
  const [showsAll, setShowsAll] = useState(false);
  const { runs, shown } = session.recent;
  const listed = showsAll ? runs : runs.slice(0, NUM_SHOWN);
  return (
    <Section title={trans.__('Recent runs')}>
      {runs.length === 0 && (
        <p className="accel-nb-hint">
          {trans.__('No run yet: cells and launches that train are listed here after they end.')}
        </p>
      )}
      <ul className="accel-nb-runs">
        {listed.map(run => (
          <li key={run.id} data-run={run.id} data-outcome={run.outcome}>
            <button
              type="button"
              aria-expanded={run.id === shown}
              onClick={() => session.recent.show(run.id === shown ? null : run.id)}
            >
              <Run run={run} trans={trans} />
            </button>
            {run.id === shown && session.recent.details !== null && (
              <Details details={session.recent.details} session={session} trans={trans} />
            )}
          </li>
        ))}
      </ul>
      {runs.length > NUM_SHOWN && (
        <div className="accel-nb-actions">
          <Action
            label={
              showsAll ? trans.__('Show fewer') : trans.__('Show %1 more', runs.length - NUM_SHOWN)
            }
            onClick={() => setShowsAll(!showsAll)}
          />
        </div>
      )}
    </Section>
  );
}

function Run({
  run,
  trans
}: {
  readonly run: IRecentRun;
  readonly trans: TranslationBundle;
}): React.JSX.Element {
  const parts = [outcomeText(run.outcome, trans), agoText(run.started, Date.now() / 1000)];
  if (run.durationS !== null) {
    parts.push(formatSeconds(Number(run.durationS.toPrecision(2))));
  }
  return (
    <>
      <span className="accel-nb-run-name">{run.name}</span>
      <span className="accel-nb-run-value">
        {run.metric !== '' && (
          <>
            <span className="accel-nb-run-metric">{run.metric}</span> {formatNumber(run.value)}
          </>
        )}
      </span>
      <span className="accel-nb-run-facts" title={new Date(run.started * 1000).toLocaleString()}>
        {parts.map(part => part.replace(/ /g, '\u00a0')).join(' · ')}
      </span>
      <Chart run={run} trans={trans} />
    </>
  );
}

function Chart({
  run,
  trans
}: {
  readonly run: IRecentRun;
  readonly trans: TranslationBundle;
}): React.JSX.Element {
  const curve = sparkline(run.steps, run.values, CHART_WIDTH, CHART_HEIGHT);
  const [width, height] = [CHART_WIDTH + 2 * MARGIN, CHART_HEIGHT + 2 * MARGIN];
  return (
    <svg
      className="accel-nb-run-chart"
      width={width}
      height={height}
      viewBox={`${-MARGIN} ${-MARGIN} ${width} ${height}`}
      role="img"
      aria-label={trans.__('%1 over %2 steps', run.metric, formatCount(run.numSteps))}
      data-points={run.values.length}
    >
      {curve !== null && (
        <>
          <path d={curve.path} />
          <circle cx={curve.end[0]} cy={curve.end[1]} r={2} />
        </>
      )}
    </svg>
  );
}

function Details({
  details,
  session,
  trans
}: IViewProps & { readonly details: IRunDetails }): React.JSX.Element {
  const { line } = details;
  const numMore = details.numCheckpoints - details.checkpoints.length;
  const labels = factTexts(trans);
  return (
    <div className="accel-nb-run-details">
      <Hints isProblem texts={details.error === '' ? [] : [details.error]} />
      <dl>
        {details.facts.map(({ name, text }) => (
          <Fact key={name} name={labels[name]}>
            {name === 'target' ? <code>{text}</code> : text}
          </Fact>
        ))}
        {details.metrics.length > 0 && (
          <Fact name={trans.__('last values')}>
            {details.metrics.map(({ name, value }) => `${name} ${formatNumber(value)}`).join(', ')}
          </Fact>
        )}
        {details.checkpoints.length > 0 && (
          <Fact name={trans.__('checkpoints')}>
            {numMore > 0 && <div>{trans.__('%1 earlier, then', formatCount(numMore))}</div>}
            {details.checkpoints.map((url, index) => (
              <div key={index}>{url}</div>
            ))}
          </Fact>
        )}
      </dl>
      {details.options.length > 0 && (
        <ul className="accel-nb-run-options">
          {details.options.map(({ option, value, source }) => (
            <li key={option} title={source}>
              <code>
                {option} = {value}
              </code>
              <span className="accel-nb-run-source">{source}</span>
            </li>
          ))}
        </ul>
      )}
      {line !== null && (
        <>
          <code className="accel-nb-run-line">
            <Words text={magicLine(line)} />
          </code>
          <div className="accel-nb-actions">
            <Action label={trans.__('Put into the cell')} onClick={() => session.useFlags(line)} />
          </div>
        </>
      )}
    </div>
  );
}

function Fact({
  name,
  children
}: {
  readonly name: string;
  readonly children: React.ReactNode;
}): React.JSX.Element {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

function outcomeText(outcome: Outcome, trans: TranslationBundle): string {
  const texts: Readonly<Record<Outcome, string>> = {
    running: trans.__('running'),
    done: trans.__('done'),
    failed: trans.__('failed'),
    interrupted: trans.__('interrupted')
  };
  return texts[outcome];
}

function factTexts(trans: TranslationBundle): Readonly<Record<RunFact, string>> {
  return {
    target: trans.__('target'),
    code: trans.__('code'),
    folder: trans.__('folder'),
    machine: trans.__('machine'),
    packages: trans.__('packages')
  };
}
