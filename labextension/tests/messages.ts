/** Messages as a kernel sends them. */

export const FACTS = {
  title: 'run',
  status: 'running',
  num_workers: 2,
  step: 3,
  loss: 0.5,
  learning_rate: 0.001,
  samples_per_s: 100,
  step_ms: 5,
  elapsed_s: 1,
  ranks: [{ rank: 0, device: 'cpu', step_ms: 5, is_straggler: false }],
  metrics: [],
  notes: [],
  accepts_actions: true,
  can_save: false,
  action_result: ''
};

export function stepMessage(
  base: number,
  rows: readonly (readonly number[])[],
  extra: Record<string, unknown> = {}
): { content: Record<string, unknown>; buffer: DataView } {
  const columns = [0, 1, 2, 3, 4, 5].flatMap(column => rows.map(row => row[column] ?? 0));
  return {
    content: {
      kind: 'delta',
      version: 1,
      base,
      seq: base + 1,
      blocks: [{ table: 'step', rank: 0, name: '', rows: rows.length }],
      facts: FACTS,
      ...extra
    },
    buffer: misaligned(Float64Array.from(columns))
  };
}

/** The same bytes at an offset that is no multiple of eight, as Jupyter hands them over. */
export function misaligned(numbers: Float64Array): DataView {
  const bytes = new Uint8Array(numbers.byteLength + 3);
  bytes.set(new Uint8Array(numbers.buffer), 3);
  return new DataView(bytes.buffer, 3);
}
