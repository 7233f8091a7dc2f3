/** Checks of a message's fields: a field of a wrong type or outside of its limits throws. */

import { capText } from '../chart/format';
import { MEAN_RANK, type JsonNumber } from '../generated/messages';

/** Thrown for a message that is malformed or of another version; the panel then ignores the message. */
export class ProtocolError extends Error {}

export const MAX_RANKS = 1024;

/** The fields of a generated record before they are checked. */
export type Unchecked<Wire> = { readonly [Field in keyof Wire]?: unknown };

/** A generated record after the check: field names in camel case, and NaN and infinities as numbers. */
export type Checked<Wire> = Wire extends readonly (infer Item)[]
  ? readonly Checked<Item>[]
  : Wire extends object
    ? { readonly [Field in keyof Wire as CamelCase<Field>]: CheckedValue<Wire[Field]> }
    : Wire;

type CheckedValue<Value> = [Value] extends [JsonNumber] ? Exclude<Value, string> : Checked<Value>;

type CamelCase<Name extends PropertyKey> = Name extends `${infer Head}_${infer Tail}`
  ? `${Head}${Capitalize<CamelCase<Tail>>}`
  : Name;

export function asRecord<Wire = Record<string, unknown>>(
  value: unknown,
  what: string
): Unchecked<Wire> {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    throw new ProtocolError(`${what} is not an object`);
  }
  return value;
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

/** A number; JSON represents NaN and infinities by their names. */
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
