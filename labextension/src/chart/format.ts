/** Formatting of numbers, durations and sizes for display. */

export const MAX_TEXT = 256;

/** Cut a string that came from a kernel or a file. */
export function capText(text: string, limit: number = MAX_TEXT): string {
  return text.length > limit ? `${text.slice(0, limit - 1)}…` : text;
}

/** A number with at least `digits` significant digits; very small and very large ones have an exponent. */
export function formatNumber(value: number | null, digits: number = 4): string {
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
  if (size < SMALL || size >= LARGE) {
    return exponential(value, digits - 1);
  }
  return grouped(value, Math.max(0, digits - 1 - exponentOf(size)));
}

/** The texts of an axis's ticks, `step` apart: enough digits to distinguish neighbors, in one notation. */
export function formatTicks(ticks: readonly (number | null)[], step: number): string[] {
  const largest = Math.max(...ticks.map(tick => Math.abs(tick ?? 0)));
  const last = lastDigit(step);
  return ticks.map(tick => {
    if (tick === null) {
      return '';
    }
    if (Math.abs(tick) < step / 2) {
      return '0';
    }
    return largest < SMALL || largest >= LARGE
      ? exponential(tick, Math.max(0, exponentOf(tick) - last))
      : grouped(tick, Math.max(0, -last));
  });
}

const SMALL = 1e-3;
const LARGE = 1e7;

/** The power of ten of a number's first digit. */
function exponentOf(value: number): number {
  return Number(value.toExponential(3).split('e')[1]);
}

/** The power of ten of the last nonzero digit, among four significant ones. */
function lastDigit(value: number): number {
  const [digits = '', exponent = '0'] = value.toExponential(3).split('e');
  return Number(exponent) - Math.max(0, String(Number(digits)).length - '0.'.length);
}

function exponential(value: number, numDecimals: number): string {
  const [digits = '', exponent = ''] = value.toExponential(numDecimals).split('e');
  return `${Number(digits)}e${Number(exponent)}`.replace(/-/g, MINUS);
}

const MINUS = '−';

export function formatCount(value: number | null): string {
  return value === null || !Number.isFinite(value) ? '–' : grouped(value);
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
  const whole = Math.round(value);
  const [hours, minutes, seconds] = [
    Math.floor(whole / 3600),
    Math.floor(whole / 60) % 60,
    whole % 60
  ];
  const parts =
    hours > 0
      ? [[hours, 'h'] as const, [minutes, 'm'] as const]
      : [[minutes, 'm'] as const, [seconds, 's'] as const];
  return parts
    .filter(([number], index) => index === 0 || number > 0)
    .map(([number, unit]) => `${number}${unit}`)
    .join(' ');
}

/** Tick distances of a time axis, in seconds; from one second on, those of a clock. */
export const SECOND_STEPS = [
  ...[-4, -3, -2, -1].flatMap(power => [1, 2, 5].map(digit => Number(`${digit}e${power}`))),
  ...[1, 2, 5, 10, 15, 30],
  ...[1, 2, 5, 10, 15, 30].map(minutes => 60 * minutes),
  ...[1, 2, 3, 6, 12, 24, 48, 120, 240, 480, 1200, 2400].map(hours => 3600 * hours)
];

const AGES = [
  ['year', 31_536_000],
  ['month', 2_592_000],
  ['day', 86_400],
  ['hour', 3600],
  ['minute', 60],
  ['second', 1]
] as const;

/** The age of a moment in the largest unit that fits; both arguments are in seconds since the epoch. */
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

function grouped(value: number, maximumFractionDigits: number = 0): string {
  return value.toLocaleString('en-US', { maximumFractionDigits }).replace('-', MINUS);
}
