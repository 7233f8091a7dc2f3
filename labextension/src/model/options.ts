/** The options of a run as the generated schema declares them. */

import schema from '../generated/options.schema.json';

export interface IOptionLine {
  readonly flag: string;
  readonly description: string;
  readonly defaultText: string;
  readonly unit: string;
}

/** The options that the magic takes as flags, in the schema's order; a strategy's own sections are left out. */
export function optionLines(): IOptionLine[] {
  const properties = schema.properties as Readonly<
    Record<string, Readonly<Record<string, unknown>>>
  >;
  return Object.entries(properties)
    .filter(([, property]) => !('$ref' in property))
    .map(([name, property]) => ({
      flag: `--${name.replace(/_/g, '-')}`,
      description: asText(property.description),
      defaultText: defaultOf(property.default),
      unit: asText(property.unit)
    }));
}

function asText(value: unknown): string {
  return typeof value === 'string' ? value : '';
}

function defaultOf(value: unknown): string {
  if (value === null || value === undefined || (Array.isArray(value) && value.length === 0)) {
    return '';
  }
  return typeof value === 'string' ? value : JSON.stringify(value);
}
