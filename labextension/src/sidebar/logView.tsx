/** Output of a rank: a list that renders visible lines only, and scrolls to new lines while it is at its end. */

import { useLayoutEffect, useRef, useState } from 'react';
import { linesInSight, type LogLines } from '../model/logLines';
import type { ILogLine } from '../model/sidebarState';
import { Choice, Section } from './parts';
import type { IViewProps } from './viewProps';

const LINE_PX = 16;
const MAX_RANKS = 16;

export function LogView({
  session,
  trans,
  logs
}: IViewProps & { readonly logs: readonly ILogLine[] }): React.JSX.Element {
  const { logRank } = session;
  const isShown = logRank !== null && logs.some(log => log.rank === logRank);
  return (
    <Section
      title={trans.__('Logs')}
      aside={
        logs.length > 0 && logs.length <= MAX_RANKS ? (
          <Choice
            label={trans.__('Log of rank')}
            options={logs.map(({ rank }) => ({ value: rank, label: String(rank) }))}
            chosen={logRank}
            onChoose={rank => session.showLog(rank === logRank ? null : rank)}
          />
        ) : (
          logs.length > 0 && (
            <input
              type="number"
              className="jp-mod-styled accel-nb-rank-input"
              min={0}
              max={logs.length - 1}
              aria-label={trans.__('Log of rank')}
              onChange={event => session.showLog(event.target.valueAsNumber)}
            />
          )
        )
      }
    >
      {logs.length === 0 && (
        <p className="accel-nb-hint">{trans.__('No cell has run on workers yet.')}</p>
      )}
      {logs.length > 0 && !isShown && (
        <p className="accel-nb-hint">{trans.__('Choose a rank to see its output.')}</p>
      )}
      {isShown && (
        <Lines key={logRank} log={session.log} label={trans.__('Log of rank %1', logRank)} />
      )}
      {isShown && session.log.length === 0 && (
        <p className="accel-nb-hint">{trans.__('This rank has printed nothing.')}</p>
      )}
    </Section>
  );
}

function Lines({
  log,
  label
}: {
  readonly log: LogLines;
  readonly label: string;
}): React.JSX.Element {
  const container = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  const [top, setTop] = useState(0);
  const [height, setHeight] = useState(240);
  useLayoutEffect(() => {
    const element = container.current;
    if (element !== null) {
      setHeight(element.clientHeight);
      if (isAtEnd.current) {
        element.scrollTop = element.scrollHeight;
      }
    }
  }, [log.length, log.numDropped]);
  const { first, last } = linesInSight(log.length, top, height, LINE_PX);
  const rows: React.JSX.Element[] = [];
  for (let index = first; index < last; index += 1) {
    rows.push(
      <div key={index} className="accel-nb-log-line" style={{ top: index * LINE_PX }}>
        {log.at(index)}
      </div>
    );
  }
  return (
    <div
      ref={container}
      className="accel-nb-log"
      role="log"
      aria-live="off"
      aria-label={label}
      tabIndex={0}
      data-lines={log.length}
      hidden={log.length === 0}
      onScroll={event => {
        const element = event.currentTarget;
        isAtEnd.current =
          element.scrollTop + element.clientHeight >= element.scrollHeight - LINE_PX;
        setTop(element.scrollTop);
      }}
    >
      <div className="accel-nb-log-lines" style={{ height: log.length * LINE_PX }}>
        {rows}
      </div>
    </div>
  );
}
