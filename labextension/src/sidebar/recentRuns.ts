/** Runs recorded on the kernel's machine, read again after a run has begun or ended. */

import type { JSONObject } from '@lumino/coreutils';
import type { SidebarChannel } from '../channel';
import {
  parseComparison,
  parseRunDetails,
  parseRuns,
  type IRecentRun,
  type IRunComparison,
  type IRunDetails,
  type IRunLabels
} from '../model/recentRuns';

export class RecentRuns {
  constructor(
    private readonly channel: SidebarChannel,
    private readonly onChange: () => void
  ) {}

  /** Newest first. */
  get runs(): readonly IRecentRun[] {
    return this.currentRuns;
  }

  /** The id of the run whose details are shown; null if none is. */
  get shown(): string | null {
    return this.shownId;
  }

  /** The details of the shown run, once received. */
  get details(): IRunDetails | null {
    return this.latestDetails?.id === this.shownId ? this.latestDetails : null;
  }

  show(id: string | null): void {
    this.shownId = id;
    void this.readDetails();
    this.onChange();
  }

  /** The kernel's refusal of the last change; empty if there is none. */
  get problem(): string {
    return this.lastProblem;
  }

  /** The differences of the selected runs; null while fewer than two are selected. */
  get comparison(): IRunComparison | null {
    return this.selected.size < 2 ? null : this.latestComparison;
  }

  isSelected(id: string): boolean {
    return this.selected.has(id);
  }

  /** Select a run for the comparison, or remove it. */
  async select(id: string, isSelected: boolean): Promise<void> {
    if (isSelected) {
      this.selected.add(id);
    } else {
      this.selected.delete(id);
    }
    await this.attempt(() => this.compare());
  }

  /** Change the labels of a run. */
  async label(id: string, labels: IRunLabels): Promise<void> {
    await this.attempt(async () => {
      await this.channel.request('label run', { id, labels: { ...labels } as JSONObject });
      this.currentRuns = parseRuns(await this.channel.request('runs', {}));
      await this.readDetails();
      await this.compare();
    });
  }

  /** Read the runs again if `stamp`, which identifies the state of the list, has changed. */
  async follow(stamp: string): Promise<void> {
    if (stamp === this.stamp) {
      return;
    }
    this.stamp = stamp;
    try {
      this.currentRuns = stamp === '' ? [] : parseRuns(await this.channel.request('runs', {}));
      await this.readDetails();
      this.onChange();
    } catch {
      this.stamp = ''; // read again with the next state
    }
  }

  /** Run a request of the user's and show a refusal. */
  private async attempt(request: () => Promise<void>): Promise<void> {
    try {
      await request();
      this.lastProblem = '';
    } catch (error) {
      this.lastProblem = error instanceof Error ? error.message : String(error);
    }
    this.onChange();
  }

  private async compare(): Promise<void> {
    const ids = [...this.selected].filter(id => this.currentRuns.some(run => run.id === id));
    this.latestComparison =
      ids.length < 2 ? null : parseComparison(await this.channel.request('compare runs', { ids }));
  }

  private async readDetails(): Promise<void> {
    const id = this.shownId;
    if (id !== null) {
      try {
        this.latestDetails = parseRunDetails(await this.channel.request('run', { id }));
        this.onChange();
      } catch {
        if (this.shownId === id) {
          this.shownId = null; // it no longer exists
        }
        this.onChange();
      }
    }
  }

  private currentRuns: readonly IRecentRun[] = [];
  private latestDetails: IRunDetails | null = null;
  private shownId: string | null = null;
  private stamp = '';
  private lastProblem = '';
  private latestComparison: IRunComparison | null = null;
  private readonly selected = new Set<string>();
}
