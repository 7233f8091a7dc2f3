/** Numbers and strings as a person reads them. */

export const MAX_TEXT = 256;

/** Cut a string that came from a kernel or a file. */
export function capText(text: string, limit: number = MAX_TEXT): string {
  return text.length > limit ? `${text.slice(0, limit - 1)}…` : text;
}

/** Four significant digits; very small and very large ones with an exponent. */
export function formatNumber(value: number | null): string {
  if (value === null) {
    return '–';
  }
  if (!Number.isFinite(value)) {
    return Number.isNaN(value) ? 'NaN' : value > 0 ? '∞' : '−∞';
  }
  const size = Math.abs(value);
  if (value === 0) {
    return '0';
  }
  if (size < 1e-3 || size >= 1e7) {
    return value
      .toExponential(size < 1e-3 ? 1 : 2)
      .replace('e+', 'e')
      .replace('-', '−')
      .replace('e-', 'e−');
  }
  if (size >= 1000) {
    return grouped(Math.round(value));
  }
  return String(Number(value.toPrecision(4)));
}

export function formatCount(value: number | null): string {
  return value === null || !Number.isFinite(value) ? '–' : grouped(Math.round(value));
}

/** A duration given in milliseconds. */
export function formatMilliseconds(value: number | null): string {
  if (value === null || !Number.isFinite(value)) {
    return '–';
  }
  if (value >= 10_000) {
    return `${(value / 1000).toFixed(1)} s`;
  }
  return `${value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

/** A duration given in seconds, for an axis. */
export function formatSeconds(value: number): string {
  if (value < 60) {
    return `${Number(value.toPrecision(6))} s`;
  }
  const minutes = Math.floor(value / 60);
  const seconds = Math.round(value % 60);
  if (minutes < 60) {
    return seconds ? `${minutes}m ${seconds}s` : `${minutes}m`;
  }
  return `${Math.floor(minutes / 60)}h ${minutes % 60}m`;
}

const AGES = [
  ['year', 31_536_000],
  ['month', 2_592_000],
  ['day', 86_400],
  ['hour', 3600],
  ['minute', 60],
  ['second', 1]
] as const;

/** How long ago a moment was, in the largest unit that fits; both in seconds since the epoch. */
export function agoText(seconds: number, now: number): string {
  const age = Math.max(0, now - seconds);
  const [unit, size] = AGES.find(([, length]) => age >= length) ?? AGES[AGES.length - 1]!;
  const format = new Intl.RelativeTimeFormat(undefined, { style: 'narrow', numeric: 'auto' });
  return format.format(-Math.floor(age / size), unit);
}

const BYTE_UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

export function formatBytes(value: number | null): string {
  if (value === null || !Number.isFinite(value)) {
    return '–';
  }
  let scaled = value;
  let unit = 0;
  while (Math.abs(scaled) >= 1024 && unit < BYTE_UNITS.length - 1) {
    scaled /= 1024;
    unit += 1;
  }
  const digits = Math.abs(scaled) >= 100 || unit === 0 || Number.isInteger(scaled) ? 0 : 1;
  return `${scaled.toFixed(digits)} ${BYTE_UNITS[unit] ?? ''}`;
}

function grouped(value: number): string {
  return value.toLocaleString('en-US');
}
