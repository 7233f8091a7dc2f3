/** The runs of the kernel's machine, asked for anew when its state says that some have begun or ended. */

import type { SidebarChannel } from '../channel';
import { parseRunDetails, parseRuns, type IRecentRun, type IRunDetails } from '../model/recentRuns';

export class RecentRuns {
  constructor(
    private readonly channel: SidebarChannel,
    private readonly onChange: () => void
  ) {}

  /** Newest first. */
  get runs(): readonly IRecentRun[] {
    return this.known;
  }

  /** The id of the run whose details are shown; null while none is. */
  get shown(): string | null {
    return this.shownId;
  }

  /** What is known of the run that is shown, once the kernel has told it. */
  get details(): IRunDetails | null {
    return this.told?.id === this.shownId ? this.told : null;
  }

  show(id: string | null): void {
    this.shownId = id;
    void this.readDetails();
    this.onChange();
  }

  /** Ask for what is new, if anything is. */
  async follow(stamp: string): Promise<void> {
    if (stamp === this.stamp) {
      return;
    }
    this.stamp = stamp;
    try {
      this.known = stamp === '' ? [] : parseRuns(await this.channel.ask('runs', {}));
      await this.readDetails();
      this.onChange();
    } catch {
      this.stamp = ''; // the next state asks again
    }
  }

  private async readDetails(): Promise<void> {
    const id = this.shownId;
    if (id !== null) {
      try {
        this.told = parseRunDetails(await this.channel.ask('run', { id }));
        this.onChange();
      } catch {
        this.shownId = null; // it is gone
        this.onChange();
      }
    }
  }

  private known: readonly IRecentRun[] = [];
  private told: IRunDetails | null = null;
  private shownId: string | null = null;
  private stamp = '';
}
