/** A memory forecast as `%accelerate plan --json` prints it, with every field checked; sizes in bytes. */

import { asList, asNumber, asRecord, asText } from './reading';

export interface IPlan {
  readonly name: string;
  readonly isCheckpointed: boolean;
  readonly isSupported: boolean;
  /** Memory by use, in the order of the table. */
  readonly parts: readonly { readonly label: string; readonly bytes: number }[];
  readonly peak: number;
  readonly missing: number;
}

export interface IForecast {
  readonly model: string;
  readonly numParameters: number;
  readonly optimizer: string;
  readonly devices: string;
  readonly room: number;
  readonly batchSize: number;
  readonly plans: readonly IPlan[];
  readonly best: string;
  readonly why: string;
  readonly notes: readonly string[];
}

const PARTS = ['parameters', 'gradients', 'optimizer', 'activations', 'exchange', 'step'] as const;

/** Parse the forecast that the magic printed; null if it printed none, because there is no model. */
export function readForecast(printed: string): IForecast | null {
  let data: unknown;
  try {
    data = JSON.parse(printed);
  } catch {
    return null;
  }
  const found = asRecord(data);
  const model = asRecord(found.model);
  const setting = asRecord(found.setting);
  return {
    model: asText(model.name),
    numParameters: asNumber(model.num_parameters),
    optimizer: asText(model.optimizer),
    devices: asText(setting.devices),
    room: asNumber(setting.room),
    batchSize: asNumber(setting.batch_size),
    plans: asList(found.plans, 64).map(readPlan),
    best: asText(asRecord(found.best).name),
    why: asText(found.why, 1024),
    notes: asList(found.notes, 16).map(note => asText(note, 1024))
  };
}

function readPlan(value: unknown): IPlan {
  const plan = asRecord(value);
  return {
    name: asText(plan.name),
    isCheckpointed: plan.activation_checkpointing === true,
    isSupported: plan.is_supported === true,
    parts: PARTS.map(label => ({ label, bytes: asNumber(plan[label]) })).filter(
      part => part.bytes > 0
    ),
    peak: asNumber(plan.peak),
    missing: asNumber(plan.missing)
  };
}
