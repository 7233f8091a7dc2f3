import { describe, expect, it } from 'vitest';
import { linesInSight, LogLines, MAX_LINES } from '../src/model/logLines';

function all(log: LogLines): string[] {
  return Array.from({ length: log.length }, (_, index) => log.at(index));
}

describe('LogLines', () => {
  it('joins pieces of lines', () => {
    const log = new LogLines();
    log.append('a');
    log.append('b\nc');
    expect(all(log)).toEqual(['ab', 'c']);
    log.append('\n');
    expect(all(log)).toEqual(['ab', 'c']);
  });

  it('shows the text after the last carriage return, without control sequences', () => {
    const log = new LogLines();
    log.append(' 10%\r 99%\r\n\u001b[31mred\u001b[0m\u0007 <b>text</b>\n\u001b]0;title\u0007x');
    expect(all(log)).toEqual([' 99%', 'red <b>text</b>', 'x']);
  });

  it('shows the latest state of a long progress bar', () => {
    const log = new LogLines();
    for (let step = 0; step <= 2000; step += 1) {
      log.append(`\rstep ${step} of 2000 ${'#'.repeat(40)}`);
    }
    expect(log.at(0)).toMatch(/^step 2000 of/);
    log.append('\r\r\n');
    expect(log.at(0)).toMatch(/^step 2000 of/);
  });

  it('drops the oldest lines', () => {
    const log = new LogLines();
    log.append(Array.from({ length: MAX_LINES + 5 }, (_, index) => `${index}\n`).join(''));
    expect(log.length).toBe(MAX_LINES);
    expect(log.numDropped).toBe(5);
    expect(log.at(0)).toBe('5');
  });
});

describe('linesInSight', () => {
  it('renders as few lines of a long list as of a short one', () => {
    expect(linesInSight(MAX_LINES, 16 * 100_000, 240, 16)).toEqual({ first: 99_990, last: 100_025 });
    expect(linesInSight(MAX_LINES, 16 * MAX_LINES - 240, 240, 16).last).toBe(MAX_LINES);
    expect(linesInSight(3, 0, 240, 16)).toEqual({ first: 0, last: 3 });
    expect(linesInSight(0, 99, 240, 16)).toEqual({ first: 0, last: 0 });
  });
});
