/** The `%%accelerate` line of a cell: finds it in the cell's text, and computes edits that set it. */

const MAGIC = '%%accelerate';

export type CellLine =
  /** A `%%accelerate` line; its flags are from `start` to `end` of the cell's text. */
  | { readonly kind: 'line'; readonly flags: string; readonly start: number; readonly end: number }
  /** Code without a cell magic: the line can be inserted before it. */
  | { readonly kind: 'none' }
  /** The first line is another cell magic. */
  | { readonly kind: 'other'; readonly magic: string };

export interface ITextEdit {
  readonly start: number;
  readonly end: number;
  readonly text: string;
}

export function findLine(source: string): CellLine {
  const found = /^(?:[ \t]*\r?\n)*[ \t]*(%%[^\s]+)([^\r\n]*)/.exec(source);
  const magic = found?.[1];
  if (!found || magic === undefined) {
    return { kind: 'none' };
  }
  if (magic !== MAGIC) {
    return { kind: 'other', magic };
  }
  const rest = found[2] ?? '';
  const start = found[0].length - rest.trimStart().length;
  return { kind: 'line', flags: rest.trim(), start, end: found[0].length };
}

/** The edit that sets the flags of the cell's line; null if the cell has another magic. */
export function editLine(source: string, flags: string): ITextEdit | null {
  const line = findLine(source);
  switch (line.kind) {
    case 'other':
      return null;
    case 'none':
      return { start: 0, end: 0, text: `${magicLine(flags)}\n` };
    case 'line': {
      const blank = flags !== '' && !/\s$/.test(source.slice(0, line.start)) ? ' ' : '';
      return { start: line.start, end: line.end, text: blank + flags };
    }
  }
}

export function magicLine(flags: string): string {
  return flags === '' ? MAGIC : `${MAGIC} ${flags}`;
}
