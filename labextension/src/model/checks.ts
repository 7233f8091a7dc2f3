/** Fields of a message from the kernel: each is of its kind and within its limits, or the message is none of ours. */

import { capText } from '../chart/format';

/** Thrown for a message that is not one of ours; the panel then stays as it is. */
export class ProtocolError extends Error {}

/** The rank under which the mean over all ranks travels. */
export const MEAN_RANK = -1;

export const MAX_RANKS = 1024;

export function asRecord(value: unknown, what: string): Record<string, unknown> {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    throw new ProtocolError(`${what} is not an object`);
  }
  return value as Record<string, unknown>;
}

export function asList(value: unknown, what: string, limit: number): unknown[] {
  if (!Array.isArray(value) || value.length > limit) {
    throw new ProtocolError(`${what} is not a list of at most ${limit}`);
  }
  return value as unknown[];
}

export function asCount(value: unknown, what: string): number {
  if (typeof value !== 'number' || !Number.isSafeInteger(value) || value < 0) {
    throw new ProtocolError(`${what} is not a count`);
  }
  return value;
}

export function asRank(value: unknown): number {
  if (
    typeof value !== 'number' ||
    !Number.isInteger(value) ||
    value < MEAN_RANK ||
    value >= MAX_RANKS
  ) {
    throw new ProtocolError('not a rank');
  }
  return value;
}

/** JSON has no NaN and no infinities: they travel by name. */
export function asNumber(value: unknown): number | null {
  switch (value) {
    case null:
    case undefined:
      return null;
    case 'nan':
      return NaN;
    case 'inf':
      return Infinity;
    case '-inf':
      return -Infinity;
  }
  if (typeof value !== 'number') {
    throw new ProtocolError('not a number');
  }
  return value;
}

export function asText(value: unknown): string {
  if (value === undefined || value === null) {
    return '';
  }
  if (typeof value !== 'string') {
    throw new ProtocolError('not a text');
  }
  return capText(value);
}
