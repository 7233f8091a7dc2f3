import { describe, expect, it } from 'vitest';
import { agoText, capText, formatBytes, formatMilliseconds, formatNumber, formatSeconds } from '../src/chart/format';

describe('format', () => {
  it.each([
    [0, '0'],
    [0.123456, '0.1235'],
    [2.5, '2.5'],
    [1234567, '1,234,567'],
    [0.00001, '1.0e−5'],
    [NaN, 'NaN'],
    [-Infinity, '−∞'],
    [null, '–']
  ])('number %s', (value, text) => {
    expect(formatNumber(value)).toBe(text);
  });

  it('bytes, durations and times', () => {
    expect(formatBytes(512)).toBe('512 B');
    expect(formatBytes(1.5 * 2 ** 30)).toBe('1.5 GiB');
    expect(formatMilliseconds(5.123)).toBe('5.12 ms');
    expect(formatMilliseconds(12_345)).toBe('12.3 s');
    expect(formatSeconds(2.5)).toBe('2.5 s');
    expect(formatSeconds(3720)).toBe('1h 2m');
  });

  it('tells ages in the largest unit', () => {
    expect(agoText(1000, 1090)).toMatch(/1\s?m/);
    expect(agoText(0, 3 * 86_400 + 5)).toMatch(/^3/);
    expect(agoText(2000, 1000)).toBe(agoText(1000, 1000));
  });

  it('caps texts', () => {
    expect(capText('abc', 3)).toBe('abc');
    expect(capText('abcd', 3)).toBe('ab…');
  });
});
