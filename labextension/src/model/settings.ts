/** The options in a notebook's metadata: `{"accel_nb": {"options": {"precision": "bf16"}}}`. */

import { valueText } from './options';
import { isRecord } from './reading';

export const METADATA_KEY = 'accel_nb';

const MAX_SETTINGS = 256;

/** The metadata's options as text, by dotted name; unknown names are kept, and the kernel reports them. */
export function readSettings(metadata: unknown): Record<string, string> {
  const options = isRecord(metadata) && isRecord(metadata.options) ? metadata.options : {};
  const settings: Record<string, string> = {};
  for (const [name, value] of Object.entries(options).slice(0, MAX_SETTINGS)) {
    if (isRecord(value)) {
      for (const [leaf, inner] of Object.entries(value)) {
        settings[`${name}.${leaf}`] = valueText(inner);
      }
    } else {
      settings[name] = valueText(value);
    }
  }
  return settings;
}

/** The metadata with these options and its other entries; undefined if it would be empty. */
export function writeSettings(
  metadata: unknown,
  settings: Readonly<Record<string, string>>
): Record<string, unknown> | undefined {
  const others = Object.entries(isRecord(metadata) ? metadata : {}).filter(
    ([key]) => key !== 'options'
  );
  const all = Object.keys(settings).length > 0 ? [...others, ['options', { ...settings }]] : others;
  return all.length > 0 ? (Object.fromEntries(all) as Record<string, unknown>) : undefined;
}
