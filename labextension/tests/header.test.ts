import { describe, expect, it } from 'vitest';
import { parseMessage } from '../src/model/protocol';
import { Header } from '../src/widget/header';
import { FACTS, stepMessage } from './messages';

function headerOf(facts: Record<string, unknown>): HTMLElement {
  const header = new Header(document.createElement('div'));
  const { content, buffer } = stepMessage(0, [], { facts: { ...FACTS, ...facts } });
  header.update(parseMessage(content, [buffer]).facts);
  return header.node;
}

describe('Header', () => {
  it('shows texts from the kernel as text, not as HTML', () => {
    const hostile = '<img src=x onerror=alert(1)>';
    const node = headerOf({ title: hostile, metrics: [{ name: hostile, value: 1 }] });
    expect(node.querySelector('img')).toBeNull();
    expect(node.textContent).toContain(hostile);
  });

  it('marks a straggler and hides the ranks of a single worker', () => {
    const ranks = [
      { rank: 0, device: 'cpu', step_ms: 5, is_straggler: false },
      { rank: 1, device: 'cpu', step_ms: 9, is_straggler: true }
    ];
    const node = headerOf({ ranks });
    const flags = [...node.querySelectorAll('.accel-nb-rank-flag')].map(flag => flag.textContent);
    expect(flags).toEqual(['', 'slow']);
    const single = headerOf({ num_workers: 1 });
    expect(single.querySelector<HTMLElement>('.accel-nb-ranks')?.hidden).toBe(true);
  });

  it('shows the time use of each rank, also of a single one', () => {
    const time_use = { reading: 0.25, computing: 0.5, blocked: 0.25, queued: 0 };
    const rank = { rank: 0, device: 'cpu', step_ms: 5, is_straggler: false };
    const node = headerOf({ num_workers: 1, ranks: [{ ...rank, time_use }] });
    expect(node.querySelector<HTMLElement>('.accel-nb-rank')?.title).toBe(
      'rank 0 on cpu: computing 50 %, reading data 25 %, waiting for ranks 25 %, no free processor 0 %'
    );
    expect(node.querySelector<HTMLElement>('.accel-nb-time-key')?.hidden).toBe(false);
    const without = headerOf({ num_workers: 2, ranks: [rank] });
    expect(without.querySelector<HTMLElement>('.accel-nb-time-key')?.hidden).toBe(true);
  });

  it('shows the position of a rank in a mesh', () => {
    const rank = { device: 'cpu', step_ms: 5, is_straggler: false };
    const ranks = [
      { ...rank, rank: 0, place: 'dp 0, tp 0' },
      { ...rank, rank: 1, place: 'dp 0, tp 1' }
    ];
    const names = [...headerOf({ ranks }).querySelectorAll('.accel-nb-rank-name')];
    expect(names.map(name => name.textContent)).toEqual(['rank 0 = dp 0, tp 0', 'rank 1 = dp 0, tp 1']);
  });

  it('shows the number of ranks if not all fit, and the slow one among them', () => {
    const ranks = Array.from({ length: 20 }, (_, rank) => ({
      rank,
      device: 'cpu',
      step_ms: 5,
      is_straggler: rank === 18
    }));
    const text = headerOf({ num_workers: 20, ranks }).textContent;
    expect(text).toContain('16 of 20 ranks');
    expect(text).toContain('rank 18');
    expect(text).not.toContain('rank 155');
  });

  it('shows no step count if only metrics were logged', () => {
    const tiles = (facts: Record<string, unknown>) =>
      [...headerOf(facts).querySelectorAll('.accel-nb-tile-label')].map(tile => tile.textContent);
    expect(tiles({ step: 0, metrics: [{ name: 'reward', value: 1 }] })).not.toContain('step');
    expect(tiles({ step: 0 })).toContain('step');
  });

  it('updates the idle time while no step ends', () => {
    const header = new Header(document.createElement('div'));
    const { content, buffer } = stepMessage(0, [], { facts: { ...FACTS, elapsed_s: 50 } });
    header.update(parseMessage(content, [buffer]).facts, 25);
    expect(header.node.textContent).toContain('elapsed01:15');
  });

  it('shows a loss that is not a number', () => {
    expect(headerOf({ losses: [{ name: 'loss', value: 'nan' }] }).textContent).toContain('NaN');
  });
});
