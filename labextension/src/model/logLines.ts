/** Output of one rank as lines. Text after a carriage return replaces the line; control sequences are removed. */

export const MAX_LINES = 200_000;
const MAX_LINE = 4096;
/** The number of lines rendered before and after the visible ones. */
const NUM_EXTRA_LINES = 10;

/** ANSI escape sequences: colors and cursor, titles, and others. */
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
  /** The number of complete lines, and of the incomplete last one. */
  get length(): number {
    return this.lines.length + (this.incomplete === '' ? 0 : 1);
  }

  /** The number of lines dropped from the beginning. */
  get numDropped(): number {
    return this.dropped;
  }

  at(index: number): string {
    return displayText(this.lines[index] ?? this.incomplete);
  }

  append(text: string): void {
    const pieces = (this.incomplete + text).split('\n');
    this.incomplete = withoutOverwritten(pieces.pop() ?? '');
    for (const piece of pieces) {
      this.lines.push(withoutOverwritten(piece));
    }
    const excess = this.lines.length - MAX_LINES;
    if (excess > 0) {
      this.lines.splice(0, excess);
      this.dropped += excess;
    }
  }

  clear(): void {
    this.lines = [];
    this.incomplete = '';
    this.dropped = 0;
  }

  private lines: string[] = [];
  private incomplete = '';
  private dropped = 0;
}

/** The range of lines to render in a list that is scrolled to `top`: the visible ones and a few around them. */
export function linesInSight(
  length: number,
  top: number,
  height: number,
  linePx: number
): { readonly first: number; readonly last: number } {
  return {
    first: Math.min(length, Math.max(0, Math.floor(top / linePx) - NUM_EXTRA_LINES)),
    last: Math.min(length, Math.ceil((top + height) / linePx) + NUM_EXTRA_LINES)
  };
}

/** The part of a line after its last carriage return, apart from those at its end. */
function withoutOverwritten(line: string): string {
  let end = line.length;
  while (line.charAt(end - 1) === '\r') {
    end -= 1;
  }
  return end === 0 ? '' : line.slice(line.lastIndexOf('\r', end - 1) + 1);
}

/** The text of a line without control characters; computed on display only. */
function displayText(raw: string): string {
  return raw
    .slice(0, 4 * MAX_LINE)
    .replace(SEQUENCES, '')
    .replace(CONTROLS, '')
    .slice(0, MAX_LINE);
}
