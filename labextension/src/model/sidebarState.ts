/** What the kernel tells the sidebar, checked field by field. */

import { capText } from '../chart/format';

const MAX_LINES = 1024;

export interface IDeviceLine {
  readonly name: string;
  readonly kind: string;
  readonly totalBytes: number;
}

export interface IWorkerLine {
  readonly rank: number;
  readonly device: string;
  readonly pid: number;
}

export interface ISidebarState {
  readonly devices: readonly IDeviceLine[];
  readonly pool: string;
  readonly workers: readonly IWorkerLine[];
  readonly notes: readonly string[];
}

/** The state in a comm message, or null when the message is something else. */
export function parseSidebarState(data: unknown): ISidebarState | null {
  if (!isRecord(data) || data.kind !== 'state' || data.version !== 1 || !isRecord(data.pool)) {
    return null;
  }
  return {
    devices: lines(data.devices).map(device => ({
      name: text(device.name),
      kind: text(device.kind),
      totalBytes: number(device.total_bytes)
    })),
    pool: text(data.pool.state),
    workers: lines(data.pool.workers).map(worker => ({
      rank: number(worker.rank),
      device: text(worker.device),
      pid: number(worker.pid)
    })),
    notes: (Array.isArray(data.notes) ? data.notes : []).slice(0, 16).map(text)
  };
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function lines(value: unknown): Record<string, unknown>[] {
  return Array.isArray(value) ? value.slice(0, MAX_LINES).filter(isRecord) : [];
}

function text(value: unknown): string {
  return typeof value === 'string' ? capText(value) : '';
}

function number(value: unknown): number {
  return typeof value === 'number' && Number.isFinite(value) ? value : 0;
}
