/** The colors of all charts, which people with color vision deficiency can distinguish (after Okabe and Ito). */

import type { IMark } from '../generated/messages';

const RANK_COLORS = [
  '#0072b2',
  '#d55e00',
  '#009e73',
  '#cc79a7',
  '#56b4e9',
  '#e69f00',
  '#8c6bb1',
  '#7f7f7f'
] as const;

export function rankColor(rank: number): string {
  return RANK_COLORS[Math.abs(rank) % RANK_COLORS.length] ?? RANK_COLORS[0];
}

/** The colors of earlier runs, whose lines are also dashed; they differ from the first two ranks' colors. */
const EARLIER_COLORS = ['#8c6bb1', '#009e73', '#e69f00', '#56b4e9', '#cc79a7'] as const;

export function earlierColor(run: number): string {
  return EARLIER_COLORS[Math.abs(run) % EARLIER_COLORS.length] ?? EARLIER_COLORS[0];
}

/** The colors of validation losses. */
const VALIDATION_COLORS = ['#cc79a7', '#e69f00', '#56b4e9'] as const;

export function validationColor(index: number): string {
  return VALIDATION_COLORS[Math.abs(index) % VALIDATION_COLORS.length] ?? VALIDATION_COLORS[0];
}

/** The layers of a memory chart, from the bottom up; `column` is the column of the memory table. */
export const MEMORY_CATEGORIES = [
  { column: 1, label: 'parameters', color: '#0072b2' },
  { column: 2, label: 'gradients', color: '#e69f00' },
  { column: 3, label: 'optimizer', color: '#009e73' },
  { column: 4, label: 'other', color: '#cc79a7' },
  { column: 5, label: 'cached', color: '#9a9a9a' }
] as const;

export const MARK_COLORS = {
  nan: '#d55e00',
  skipped: '#e69f00',
  restart: '#7f7f7f',
  failed: '#d55e00',
  interrupted: '#8c6bb1',
  checkpoint: '#009e73',
  control: '#0072b2',
  begins: '#7f7f7f'
} as const satisfies Record<IMark['kind'], string>;

/** The text that is shown when the pointer is at a mark. */
export function markText({ kind, rank, text }: IMark): string {
  switch (kind) {
    case 'nan':
      return 'loss not finite';
    case 'skipped':
      return 'step skipped';
    case 'restart':
      return 'the step count restarts';
    case 'failed':
      return `rank ${rank} failed: ${text}`;
    case 'interrupted':
      return 'interrupted';
    case 'begins':
      return `${text} begins`;
    case 'checkpoint':
    case 'control':
      return text;
  }
}

export function isMarkKind(value: unknown): value is IMark['kind'] {
  return typeof value === 'string' && Object.prototype.hasOwnProperty.call(MARK_COLORS, value);
}

/** The color with the opacity `share`; a color that is neither hexadecimal nor rgb() is returned unchanged. */
export function faint(color: string, share: number): string {
  if (/^#[0-9a-f]{6}$/i.test(color)) {
    const alpha = Math.round(255 * share);
    return `${color}${alpha.toString(16).padStart(2, '0')}`;
  }
  const parts = /^rgba?\(\s*(\d+)[,\s]+(\d+)[,\s]+(\d+)/.exec(color);
  return parts === null ? color : `rgba(${parts[1]}, ${parts[2]}, ${parts[3]}, ${share})`;
}
