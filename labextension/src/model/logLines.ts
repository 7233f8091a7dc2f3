/** Output of one rank as lines: a carriage return restarts a line, control sequences are removed. */

export const MAX_LINES = 200_000;
const MAX_LINE = 4096;
const BESIDE = 10;

/** ANSI sequences (of colors, of titles, others), then other control characters. */
const SEQUENCES = new RegExp(
  [
    '\\x1b\\[[0-?]*[ -/]*[@-~]',
    '\\x1b\\][^\\x07\\x1b]*(?:\\x07|\\x1b\\\\)?',
    '\\x1b[@-Z\\\\-_]'
  ].join('|'),
  'g'
);
const CONTROLS = /[^\P{Cc}\t]/gu;

export class LogLines {
  /** Whole lines and the one that is being written. */
  get length(): number {
    return this.lines.length + (this.open === '' ? 0 : 1);
  }

  /** How many lines were dropped at the beginning. */
  get numDropped(): number {
    return this.dropped;
  }

  at(index: number): string {
    return shown(this.lines[index] ?? this.open);
  }

  append(text: string): void {
    const pieces = (this.open + text).split('\n');
    this.open = pieces.pop() ?? '';
    for (const piece of pieces) {
      this.lines.push(piece);
    }
    const excess = this.lines.length - MAX_LINES;
    if (excess > 0) {
      this.lines.splice(0, excess);
      this.dropped += excess;
    }
  }

  clear(): void {
    this.lines = [];
    this.open = '';
    this.dropped = 0;
  }

  private lines: string[] = [];
  private open = '';
  private dropped = 0;
}

/** The lines to draw of a list that is scrolled to `top`: those in sight and a few around them. */
export function linesInSight(
  length: number,
  top: number,
  height: number,
  linePx: number
): { readonly first: number; readonly last: number } {
  return {
    first: Math.min(length, Math.max(0, Math.floor(top / linePx) - BESIDE)),
    last: Math.min(length, Math.ceil((top + height) / linePx) + BESIDE)
  };
}

/** Lines are cleaned when they are shown. */
function shown(raw: string): string {
  const parts = raw
    .slice(0, 4 * MAX_LINE)
    .split('\r')
    .filter(part => part !== '');
  return (parts[parts.length - 1] ?? '')
    .replace(SEQUENCES, '')
    .replace(CONTROLS, '')
    .slice(0, MAX_LINE);
}
