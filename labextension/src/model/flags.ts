/**
 * Parses and edits the flags of a `%%accelerate` line in place; other text of the line stays unchanged.
 *
 * This module finds the positions of flags and values, by the same rules of quoting as the kernel, which interprets
 * the values.
 */

import { OPTION_BY_FLAG, OPTIONS, type IOption } from './options';

interface IWord {
  readonly text: string;
  readonly start: number;
  readonly end: number;
}

interface IFlag {
  readonly option: IOption;
  /** The value as text; null where one is missing. */
  readonly value: string | null;
  readonly start: number;
  readonly end: number;
}

/** The values in a line, by option; null if a quotation mark is never closed. */
export function readValues(line: string): ReadonlyMap<string, string> | null {
  const flags = findFlags(line);
  return (
    flags &&
    new Map(flags.flatMap(({ option, value }) => (value === null ? [] : [[option.name, value]])))
  );
}

/**
 * The line with one option set, or without it if the value is undefined. An existing flag is replaced in place and its
 * repetitions are removed; null if the line cannot be parsed or the value cannot be written.
 */
export function withValue(line: string, name: string, value: string | undefined): string | null {
  const flags = findFlags(line);
  const option = OPTIONS.get(name);
  // eslint-disable-next-line no-control-regex
  if (flags === null || option === undefined || /[\u0000-\u001f\u007f]/.test(value ?? '')) {
    return null;
  }
  const present = flags.filter(flag => flag.option === option);
  const written = value === undefined ? '' : flagText(option, value);
  if (present.length === 0) {
    const end = commentStart(line);
    const head = line.slice(0, end).trimEnd();
    const tail = end < line.length ? `  ${line.slice(end)}` : '';
    return written === '' ? line : (head === '' ? written : `${head} ${written}`) + tail;
  }
  let changed = line;
  for (const [index, flag] of [...present.entries()].reverse()) {
    if (index === 0 && written !== '') {
      changed = changed.slice(0, flag.start) + written + changed.slice(flag.end);
    } else {
      const before = changed.slice(0, flag.start).trimEnd();
      const after = changed.slice(flag.end);
      changed = before === '' ? after.trimStart() : before + after;
    }
  }
  return changed;
}

/** The flag that sets a value. */
export function flagText(option: IOption, value: string): string {
  if (option.isSwitch && (value === 'on' || value === 'off')) {
    return value === 'on' ? `--${option.flag}` : `--no-${option.flag}`;
  }
  const separator = value === '' || value.startsWith('-') ? '=' : ' ';
  return `--${option.flag}${separator}${value === '' ? '' : quoted(value)}`;
}

function findFlags(line: string): IFlag[] | null {
  const words = splitWords(line);
  if (words === null) {
    return null;
  }
  const flags: IFlag[] = [];
  words.forEach((word, index) => {
    const [, name = '', given] = /^--([^=]*)(?:=(.*))?$/s.exec(word.text) ?? [];
    const option = OPTION_BY_FLAG.get(name);
    if (option === undefined) {
      return;
    }
    const next = words[index + 1];
    if (option.isSwitch && given === undefined) {
      const value = name === option.flag ? 'on' : 'off';
      flags.push({ option, value, start: word.start, end: word.end });
    } else if (given !== undefined || next === undefined || isFlagLike(next.text)) {
      flags.push({ option, value: given ?? null, start: word.start, end: word.end });
    } else {
      flags.push({ option, value: next.text, start: word.start, end: next.end });
    }
  });
  return flags;
}

function isFlagLike(word: string): boolean {
  return /^-(?![\d.])/.test(word);
}

/** The position at which the comment of a line begins; the line's length if it has none. */
function commentStart(line: string): number {
  const words = splitWords(line) ?? [];
  const found = line.indexOf('#', words[words.length - 1]?.end ?? 0);
  return found < 0 ? line.length : found;
}

/** Words as a POSIX shell splits them, with their positions; null if a quotation mark is never closed. */
export function splitWords(line: string): IWord[] | null {
  const words: IWord[] = [];
  let at = 0;
  while (at < line.length) {
    if (isBlank(line[at])) {
      at += 1;
      continue;
    }
    if (line[at] === '#') {
      break; // a comment
    }
    const start = at;
    let text = '';
    while (at < line.length && !isBlank(line[at])) {
      const piece = readPiece(line, at);
      if (piece === null) {
        return null;
      }
      text += piece.text;
      at = piece.end;
    }
    words.push({ text, start, end: at });
  }
  return words;
}

function readPiece(line: string, at: number): { text: string; end: number } | null {
  const char = line.charAt(at);
  if (char === '\\') {
    return at + 1 < line.length ? { text: line.charAt(at + 1), end: at + 2 } : null;
  }
  if (char === "'") {
    const end = line.indexOf("'", at + 1);
    return end < 0 ? null : { text: line.slice(at + 1, end), end: end + 1 };
  }
  if (char !== '"') {
    return { text: char, end: at + 1 };
  }
  let text = '';
  for (let end = at + 1; end < line.length; end += 1) {
    const inner = line.charAt(end);
    if (inner === '"') {
      return { text, end: end + 1 };
    }
    if (inner === '\\' && /["\\]/.test(line.charAt(end + 1))) {
      end += 1;
      text += line.charAt(end);
    } else {
      text += inner;
    }
  }
  return null;
}

function isBlank(char: string | undefined): boolean {
  return char === ' ' || char === '\t' || char === '\r' || char === '\n';
}

function quoted(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replace(/'/g, `'"'"'`)}'`;
}
