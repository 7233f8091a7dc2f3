/** The recent runs: outcome, last loss and a small chart of each; a click shows its details and options. */

import type { TranslationBundle } from '@jupyterlab/translation';
import { useState } from 'react';
import { agoText, formatCount, formatNumber, formatSeconds } from '../chart/format';
import { sparkline } from '../chart/sparkline';
import { magicLine } from '../model/cellLine';
import {
  parseTags,
  selectRuns,
  SORT_ORDERS,
  type IRecentRun,
  type IRunComparison,
  type IRunDetails,
  type IRunLabels,
  type Outcome,
  type RunFact,
  type SortOrder
} from '../model/recentRuns';
import { Action, Hints, Section, Words } from './parts';
import type { IViewProps } from './viewProps';

const NUM_SHOWN = 5;
const CHART_WIDTH = 60;
const CHART_HEIGHT = 22;
const MARGIN = 3;

export function RunsView({ session, trans }: IViewProps): React.JSX.Element {
  const [showsAll, setShowsAll] = useState(false);
  const [filter, setFilter] = useState('');
  const [isStarredOnly, setIsStarredOnly] = useState(false);
  const [order, setOrder] = useState<SortOrder>('newest');
  const { recent } = session;
  const found = selectRuns(recent.runs, filter, isStarredOnly, order);
  const listed = showsAll ? found : found.slice(0, NUM_SHOWN);
  const orders = orderTexts(trans);
  return (
    <Section title={trans.__('Recent runs')}>
      {recent.runs.length === 0 && (
        <p className="accel-nb-hint">
          {trans.__('No run yet: cells and launches that train are listed here after they end.')}
        </p>
      )}
      {recent.runs.length > 1 && (
        <div className="accel-nb-runs-filter">
          <input
            type="search"
            className="jp-mod-styled"
            placeholder={trans.__('Name, tag, notebook')}
            aria-label={trans.__('Filter the runs')}
            value={filter}
            onChange={event => setFilter(event.target.value)}
          />
          <select
            className="jp-mod-styled"
            aria-label={trans.__('Order of the runs')}
            value={order}
            onChange={event =>
              setOrder(SORT_ORDERS.find(name => name === event.target.value) ?? 'newest')
            }
          >
            {SORT_ORDERS.map(name => (
              <option key={name} value={name}>
                {orders[name]}
              </option>
            ))}
          </select>
          <Star
            isOn={isStarredOnly}
            label={trans.__('Only runs with a star')}
            onClick={() => setIsStarredOnly(!isStarredOnly)}
          />
        </div>
      )}
      <Hints isProblem texts={recent.problem === '' ? [] : [recent.problem]} />
      {recent.runs.length > 0 && found.length === 0 && (
        <p className="accel-nb-hint">{trans.__('No run matches.')}</p>
      )}
      <ul className="accel-nb-runs">
        {listed.map(run => (
          <li key={run.id} data-run={run.id} data-outcome={run.outcome}>
            <div className="accel-nb-run-row">
              <button
                type="button"
                className="accel-nb-run"
                aria-expanded={run.id === recent.shown}
                onClick={() => recent.show(run.id === recent.shown ? null : run.id)}
              >
                <Run run={run} trans={trans} />
              </button>
              <Star
                isOn={run.isStarred}
                label={trans.__('Star: keep this run')}
                onClick={() => void recent.label(run.id, { is_starred: !run.isStarred })}
              />
            </div>
            {run.id === recent.shown && recent.details !== null && (
              <Details
                key={run.id}
                run={run}
                details={recent.details}
                session={session}
                trans={trans}
              />
            )}
          </li>
        ))}
      </ul>
      {found.length > NUM_SHOWN && (
        <div className="accel-nb-actions">
          <Action
            label={
              showsAll ? trans.__('Show fewer') : trans.__('Show %1 more', found.length - NUM_SHOWN)
            }
            onClick={() => setShowsAll(!showsAll)}
          />
        </div>
      )}
      {recent.comparison !== null && (
        <Comparison comparison={recent.comparison} session={session} trans={trans} />
      )}
    </Section>
  );
}

function Star({
  isOn,
  label,
  onClick
}: {
  readonly isOn: boolean;
  readonly label: string;
  readonly onClick: () => void;
}): React.JSX.Element {
  return (
    <button
      type="button"
      className="accel-nb-star"
      aria-pressed={isOn}
      aria-label={label}
      title={label}
      onClick={onClick}
    >
      {isOn ? '\u2605' : '\u2606'}
    </button>
  );
}

/** The differences of the selected runs: a column for each. */
function Comparison({
  comparison,
  session,
  trans
}: IViewProps & { readonly comparison: IRunComparison }): React.JSX.Element {
  const names = new Map(session.recent.runs.map(run => [run.id, run.name]));
  return (
    <div className="accel-nb-table accel-nb-comparison" tabIndex={0}>
      <table>
        <caption>{trans.__('Where the selected runs differ')}</caption>
        <thead>
          <tr>
            <th scope="col" />
            {comparison.ids.map(id => (
              <th key={id} scope="col" title={id}>
                {names.get(id) ?? id}{' '}
                <button
                  type="button"
                  aria-label={trans.__('Remove %1 from the comparison', names.get(id) ?? id)}
                  onClick={() => void session.recent.select(id, false)}
                >
                  {'\u00d7'}
                </button>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {comparison.rows.map(({ name, values }) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              {values.map((value, index) => (
                <td key={index}>{value}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** The user's name, tags and notes of a run; each is saved when its field is left. */
function Labels({
  run,
  details,
  session,
  trans
}: IViewProps & { readonly run: IRecentRun; readonly details: IRunDetails }): React.JSX.Element {
  const [name, setName] = useState(run.name);
  const [tags, setTags] = useState(run.tags.join(', '));
  const [notes, setNotes] = useState(details.notes);
  const save = (labels: IRunLabels): void => void session.recent.label(run.id, labels);
  return (
    <div className="accel-nb-run-labels">
      <label>
        {trans.__('name')}
        <input
          className="jp-mod-styled"
          value={name}
          placeholder={details.recordedName}
          onChange={event => setName(event.target.value)}
          onBlur={() => name !== run.name && save({ name })}
        />
      </label>
      <label>
        {trans.__('tags')}
        <input
          className="jp-mod-styled"
          value={tags}
          placeholder={trans.__('separated by commas')}
          onChange={event => setTags(event.target.value)}
          onBlur={() => tags !== run.tags.join(', ') && save({ tags: parseTags(tags) })}
        />
      </label>
      <label>
        {trans.__('notes')}
        <textarea
          className="jp-mod-styled"
          rows={Math.min(8, Math.max(2, notes.split('\n').length))}
          value={notes}
          onChange={event => setNotes(event.target.value)}
          onBlur={() => notes !== details.notes && save({ notes })}
        />
      </label>
    </div>
  );
}

function orderTexts(trans: TranslationBundle): Readonly<Record<SortOrder, string>> {
  return {
    newest: trans.__('newest first'),
    name: trans.__('by name'),
    value: trans.__('by last value'),
    duration: trans.__('by duration')
  };
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
        {run.tags.map(tag => (
          <span key={tag} className="accel-nb-tag">
            {tag}
          </span>
        ))}
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
  run,
  details,
  session,
  trans
}: IViewProps & { readonly run: IRecentRun; readonly details: IRunDetails }): React.JSX.Element {
  const { line } = details;
  const numMore = details.numCheckpoints - details.checkpoints.length;
  const labels = factTexts(trans);
  return (
    <div className="accel-nb-run-details">
      <Hints isProblem texts={details.error === '' ? [] : [details.error]} />
      <Labels run={run} details={details} session={session} trans={trans} />
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
        <code className="accel-nb-run-line">
          <Words text={magicLine(line)} />
        </code>
      )}
      <div className="accel-nb-actions">
        {line !== null && (
          <Action label={trans.__('Put into the cell')} onClick={() => session.useFlags(line)} />
        )}
        <Action
          label={
            session.recent.isSelected(run.id)
              ? trans.__('Do not compare')
              : trans.__('Select to compare')
          }
          onClick={() => void session.recent.select(run.id, !session.recent.isSelected(run.id))}
        />
      </div>
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
    notebook: trans.__('notebook'),
    code: trans.__('code'),
    folder: trans.__('folder'),
    machine: trans.__('machine'),
    packages: trans.__('packages')
  };
}
