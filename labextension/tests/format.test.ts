import { describe, expect, it } from 'vitest';
import {
  agoText,
  capText,
  formatBytes,
  formatMilliseconds,
  formatNumber,
  formatSeconds,
  formatTicks
} from '../src/chart/format';

describe('format', () => {
  it.each([
    [0, '0'],
    [0.123456, '0.1235'],
    [2.5, '2.5'],
    [1234567, '1,234,567'],
    [0.00001, '1e−5'],
    [-0.0000375, '−3.75e−5'],
    [12345678, '1.235e7'],
    [-1234.5, '−1,235'],
    [9.99996, '10'],
    [NaN, 'NaN'],
    [-Infinity, '−∞'],
    [null, '–']
  ])('number %s', (value, text) => {
    expect(formatNumber(value)).toBe(text);
  });

  it.each([
    [[0, 0.25, 0.5], 0.25, ['0', '0.25', '0.5']],
    [[2.30012, 2.300125, 2.30013], 5e-6, ['2.30012', '2.300125', '2.30013']],
    [[0, 5e-5, 5.5e-4], 5e-5, ['0', '5e−5', '5.5e−4']],
    [[0, 2e5, 1.2e6], 2e5, ['0', '200,000', '1,200,000']],
    [[0, 2.5e7, 1e8], 2.5e7, ['0', '2.5e7', '1e8']],
    [[-1.5, null, 1.5], 0.5, ['−1.5', '', '1.5']],

  ])('ticks %s', (ticks, step, texts) => {
    expect(formatTicks(ticks, step)).toEqual(texts);
  });

  it('distinguishes values that differ in late digits', () => {
    expect(formatNumber(2.3001234, 7)).toBe('2.300123');
  });

  it('bytes, durations and times', () => {
    expect(formatBytes(512)).toBe('512 B');
    expect(formatBytes(1.5 * 2 ** 30)).toBe('1.5 GiB');
    expect(formatMilliseconds(5.123)).toBe('5.12 ms');
    expect(formatMilliseconds(12_345)).toBe('12.3 s');
    expect(formatSeconds(2.5)).toBe('2.5 s');
    expect(formatSeconds(3720)).toBe('1h 2m');
    expect(formatSeconds(3599.7)).toBe('1h');
    expect(formatSeconds(600)).toBe('10m');
  });

  it('formats ages in the largest unit', () => {
    expect(agoText(1000, 1090)).toMatch(/1\s?m/);
    expect(agoText(0, 3 * 86_400 + 5)).toMatch(/^3/);
    expect(agoText(2000, 1000)).toBe(agoText(1000, 1000));
  });

  it('caps texts', () => {
    expect(capText('abc', 3)).toBe('abc');
    expect(capText('abcd', 3)).toBe('ab…');
  });
});
