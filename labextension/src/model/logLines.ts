/** What one rank printed, as lines to show: a carriage return starts a line over, control sequences are left out. */

export const MAX_LINES = 200_000;
const MAX_LINE = 4096;

// eslint-disable-next-line no-control-regex
const CONTROL =
  /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[@-Z\\-_])|[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/g;

export class LogLines {
  /** Whole lines and the one that is being written. */
  get length(): number {
    return this.lines.length + (this.open === '' ? 0 : 1);
  }

  /** How many lines were let go of at the beginning. */
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

/** Only what is shown is cleaned: a line is looked at when it comes into sight. */
function shown(raw: string): string {
  const parts = raw
    .slice(0, 4 * MAX_LINE)
    .split('\r')
    .filter(part => part !== '');
  return (parts[parts.length - 1] ?? '').replace(CONTROL, '').slice(0, MAX_LINE);
}
