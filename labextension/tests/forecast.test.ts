import { describe, expect, it } from 'vitest';
import { readForecast } from '../src/model/forecast';

const FOUND = {
  model: { name: 'Net', num_parameters: 10, optimizer: 'adamw' },
  setting: { devices: '2 CPU workers', room: 100, batch_size: 8 },
  plans: [
    { name: 'ddp', activation_checkpointing: false, parameters: 40, gradients: 40, activations: null, peak: 80, missing: 0, is_supported: true },
    { name: 'zero', activation_checkpointing: true, parameters: 'x', peak: 20, missing: 0, is_supported: false }
  ],
  best: { name: 'ddp' },
  why: '-> ddp',
  notes: ['<img src=x>']
};

describe('readForecast', () => {
  it('parses the output of the magic', () => {
    const forecast = readForecast(JSON.stringify(FOUND));
    expect(forecast?.model).toBe('Net');
    expect(forecast?.plans[0]?.parts).toEqual([
      { label: 'parameters', bytes: 40 },
      { label: 'gradients', bytes: 40 }
    ]);
    expect(forecast?.plans[1]).toMatchObject({ isCheckpointed: true, isSupported: false, parts: [] });
    expect(forecast?.best).toBe('ddp');
  });

  it.each(['', 'no forecast', '{'])('finds none in %j', printed => {
    expect(readForecast(printed)).toBeNull();
  });
});
