/** The panel's header: title and status, progress, metrics, and the step time of each rank. */

import {
  capText,
  formatCount,
  formatMilliseconds,
  formatNumber,
  formatSeconds
} from '../chart/format';
import { rankColor } from '../chart/palette';
import type { IFacts, IRankFacts } from '../model/protocol';
import { element, setText } from './dom';

const MAX_RANK_CHIPS = 16;

export class Header {
  constructor(controls: HTMLElement) {
    this.node = element(
      'div',
      'accel-nb-header',
      element('div', 'accel-nb-title-row', this.status, this.title, controls),
      this.progress,
      this.tiles,
      this.ranks
    );
  }

  readonly node: HTMLElement;

  /** `idleS` is the time in seconds since the last step of a running cell ended, else 0. */
  update(facts: IFacts, idleS: number = 0): void {
    setText(this.title, facts.title);
    setText(this.status, facts.status);
    this.status.dataset.status = facts.status;
    this.updateProgress(facts);
    this.updateTiles(tilesOf(facts, idleS));
    this.updateRanks(facts);
  }

  private updateProgress({ progress, status }: IFacts): void {
    const { epoch, numEpochs, fraction, batchFraction, remainingS } = progress;
    const part = fraction ?? batchFraction;
    this.progress.hidden = part === null || status !== 'running';
    const percent = Math.round(100 * Math.min(1, part ?? 0));
    this.bar.setAttribute('aria-valuenow', String(percent));
    this.fill.style.width = `${percent}%`;
    const ofEpoch = fraction === null ? ' of the epoch' : '';
    const words = [
      epoch === 0 ? '' : numEpochs > 0 ? `epoch ${epoch} of ${numEpochs}` : `epoch ${epoch}`,
      `${percent} %${ofEpoch}`,
      remainingS === null ? '' : `${formatSeconds(Math.round(remainingS))} left`
    ];
    setText(this.progressText, words.filter(word => word !== '').join('  ·  '));
  }

  private updateTiles(wanted: ITile[]): void {
    while (this.tiles.children.length > wanted.length) {
      this.tiles.lastElementChild?.remove();
    }
    wanted.forEach(({ label, value }, index) => {
      let tile = this.tiles.children[index];
      if (tile === undefined) {
        tile = element(
          'div',
          'accel-nb-tile',
          element('span', 'accel-nb-tile-label'),
          element('span', 'accel-nb-tile-value')
        );
        this.tiles.append(tile);
      }
      const [labelNode, valueNode] = tile.children as unknown as HTMLElement[];
      setText(labelNode as HTMLElement, label);
      setText(valueNode as HTMLElement, value);
    });
  }

  private updateRanks(facts: IFacts): void {
    const hasTimes = facts.ranks.some(rank => rank.stepMs !== null);
    const isUseful = facts.numWorkers > 1 || facts.ranks.some(rank => rank.timeUse !== null);
    const shown = isUseful && hasTimes ? chosenRanks(facts.ranks) : [];
    while (this.chips.children.length > shown.length) {
      this.chips.lastElementChild?.remove();
    }
    this.ranks.hidden = shown.length === 0;
    this.timeKey.hidden = shown.every(rank => rank.timeUse === null);
    const isAll = shown.length === facts.ranks.length;
    setText(this.more, isAll ? '' : `${shown.length} of ${facts.ranks.length} ranks`);
    const slowest = Math.max(...shown.map(rank => rank.stepMs ?? 0), 1e-9);
    shown.forEach((rank, index) => {
      let chip = this.chips.children[index] as HTMLElement | undefined;
      if (chip === undefined) {
        chip = makeChip();
        this.chips.append(chip);
      }
      updateChip(chip, rank, slowest);
    });
  }

  private readonly title = element('span', 'accel-nb-title');
  private readonly status = element('span', 'accel-nb-status');
  private readonly fill = element('span', 'accel-nb-progress-fill');
  private readonly bar = progressBar(this.fill);
  private readonly progressText = element('span', 'accel-nb-progress-text');
  private readonly progress = element('div', 'accel-nb-progress', this.bar, this.progressText);
  private readonly tiles = element('div', 'accel-nb-tiles');
  private readonly chips = element('div', 'accel-nb-rank-list');
  private readonly more = element('div', 'accel-nb-rank');
  private readonly timeKey = makeTimeKey();
  private readonly ranks = element('div', 'accel-nb-ranks', this.chips, this.more, this.timeKey);
}

type TimeUse = NonNullable<IRankFacts['timeUse']>;

/** The uses of a rank's time: the name and the color of each part, in the order of drawing. */
const TIME_PARTS: readonly { part: keyof TimeUse; name: string; color: string }[] = [
  { part: 'computing', name: 'computing', color: '#0072b2' },
  { part: 'reading', name: 'reading data', color: '#e69f00' },
  { part: 'blocked', name: 'waiting for ranks', color: '#9aa5ad' },
  { part: 'queued', name: 'no free processor', color: '#cc3311' }
];

function gradientOf(timeUse: TimeUse): string {
  let end = 0;
  const stops = TIME_PARTS.map(({ part, color }) => {
    const start = end;
    end += 100 * timeUse[part];
    return `${color} ${start.toFixed(1)}% ${end.toFixed(1)}%`;
  });
  return `linear-gradient(to right, ${stops.join(', ')})`;
}

function timeText(timeUse: TimeUse): string {
  return TIME_PARTS.map(({ part, name }) => `${name} ${Math.round(100 * timeUse[part])} %`).join(
    ', '
  );
}

function makeTimeKey(): HTMLElement {
  const entries = TIME_PARTS.map(({ name, color }) => {
    const swatch = element('span', 'accel-nb-time-swatch');
    swatch.style.background = color;
    return element('span', 'accel-nb-time-part', swatch, name);
  });
  return element('div', 'accel-nb-time-key', ...entries);
}

/** The first ranks; a straggler among the others replaces the last of them. */
function chosenRanks(ranks: readonly IRankFacts[]): readonly IRankFacts[] {
  const shown = ranks.slice(0, MAX_RANK_CHIPS);
  const slow = ranks.slice(MAX_RANK_CHIPS).find(rank => rank.isStraggler);
  return slow === undefined ? shown : [...shown.slice(0, -1), slow];
}

interface ITile {
  readonly label: string;
  readonly value: string;
}

function tilesOf(facts: IFacts, idleS: number): ITile[] {
  const tiles: ITile[] = [];
  if (facts.step > 0 || facts.metrics.length === 0) {
    tiles.push({ label: 'step', value: formatCount(facts.step) });
  }
  for (const loss of facts.losses.slice(0, 4)) {
    tiles.push({ label: capText(loss.name, 24), value: formatNumber(loss.value) });
  }
  if (facts.learningRate !== null) {
    tiles.push({ label: 'learning rate', value: formatNumber(facts.learningRate) });
  }
  if (facts.samplesPerS !== null) {
    tiles.push({ label: 'samples/s', value: formatCount(facts.samplesPerS) });
  }
  if (facts.stepMs !== null) {
    tiles.push({ label: 'per step', value: formatMilliseconds(facts.stepMs) });
  }
  if (facts.elapsedS !== null) {
    tiles.push({ label: 'elapsed', value: elapsedText(facts.elapsedS + idleS) });
  }
  for (const metric of facts.metrics.slice(0, 6)) {
    tiles.push({ label: capText(metric.name, 24), value: formatNumber(metric.value) });
  }
  return tiles;
}

function progressBar(fill: HTMLElement): HTMLElement {
  const bar = element('span', 'accel-nb-progress-bar', fill);
  bar.setAttribute('role', 'progressbar');
  bar.setAttribute('aria-label', 'Progress of the run');
  bar.setAttribute('aria-valuemin', '0');
  bar.setAttribute('aria-valuemax', '100');
  return bar;
}

function elapsedText(seconds: number): string {
  if (seconds < 60) {
    return `${seconds.toFixed(1)} s`;
  }
  const whole = Math.floor(seconds);
  const pad = (value: number) => String(value).padStart(2, '0');
  const hours = Math.floor(whole / 3600);
  const rest = `${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
  return hours > 0 ? `${hours}:${rest}` : rest;
}

/** The number of a rank, with its place in a mesh of several dimensions. */
export function rankName({ rank, place }: Pick<IRankFacts, 'rank' | 'place'>): string {
  return place === '' ? `rank ${rank}` : `rank ${rank} = ${place}`;
}

function makeChip(): HTMLElement {
  return element(
    'div',
    'accel-nb-rank',
    element('span', 'accel-nb-rank-name'),
    element('span', 'accel-nb-rank-bar', element('span', 'accel-nb-rank-fill')),
    element('span', 'accel-nb-rank-time'),
    element('span', 'accel-nb-rank-flag')
  );
}

function updateChip(chip: HTMLElement, rank: IRankFacts, slowest: number): void {
  const [name, bar, time, flag] = chip.children as unknown as HTMLElement[];
  const fill = bar?.firstElementChild as HTMLElement;
  setText(name as HTMLElement, rankName(rank));
  setText(time as HTMLElement, formatMilliseconds(rank.stepMs));
  setText(flag as HTMLElement, rank.isStraggler ? 'slow' : '');
  const share = (rank.stepMs ?? 0) / slowest;
  fill.style.width = rank.timeUse === null ? `${Math.round(100 * share)}%` : '100%';
  fill.style.background = rank.timeUse === null ? rankColor(rank.rank) : gradientOf(rank.timeUse);
  const where = rank.device ? `${rankName(rank)} on ${rank.device}: ` : '';
  chip.title = where + (rank.timeUse === null ? 'time of a step' : timeText(rank.timeUse));
  chip.classList.toggle('accel-nb-is-slow', rank.isStraggler);
}
