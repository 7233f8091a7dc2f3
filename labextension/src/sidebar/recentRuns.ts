/** Runs recorded on the kernel's machine, read again after a run has begun or ended. */

import type { SidebarChannel } from '../channel';
import { parseRunDetails, parseRuns, type IRecentRun, type IRunDetails } from '../model/recentRuns';

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

  private async readDetails(): Promise<void> {
    const id = this.shownId;
    if (id !== null) {
      try {
        this.latestDetails = parseRunDetails(await this.channel.request('run', { id }));
        this.onChange();
      } catch {
        this.shownId = null; // it no longer exists
        this.onChange();
      }
    }
  }

  private currentRuns: readonly IRecentRun[] = [];
  private latestDetails: IRunDetails | null = null;
  private shownId: string | null = null;
  private stamp = '';
}
