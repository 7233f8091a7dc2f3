/** One view of a panel: header, the chart over steps, the memory charts. */

import { capText, formatSeconds } from '../chart/format';
import { download, fileName, toCsv, toPng } from '../chart/save';
import { readTheme, watchTheme } from '../chart/theme';
import type { AxisName } from '../model/earlierRuns';
import type { ICurve, PanelModel } from '../model/panelModel';
import { BlockSection } from './blockSection';
import { CurveSection } from './curveSection';
import { actionButton, chooser, element, setText, toggleButton } from './dom';
import { EarlierList } from './earlierList';
import { EndNotification } from './endNotification';
import { Header } from './header';
import { MemorySection } from './memorySection';
import { RunControls, type Action } from './runControls';
import { SmallCharts, spansDecades, isVarying } from './smallCharts';

const CHART_HEIGHT = 270;

/** The height of the memory charts, which have one more line above them. */
const MAPS_HEIGHT = CHART_HEIGHT - 20;

const AXES: readonly { value: AxisName; label: string }[] = [
  { value: 'step', label: 'over steps' },
  { value: 'samples', label: 'over samples' },
  { value: 'time', label: 'over time' }
];

const SMOOTHINGS = [
  { value: 'auto', label: 'auto smooth' },
  { value: '0', label: 'raw' },
  { value: '0.8', label: 'smooth' },
  { value: '0.95', label: 'smoother' },
  { value: '0.99', label: 'smoothest' }
];

/** Time without a step after which a note is shown, unless steps usually take longer. */
const MIN_WAIT_S = 10;

const LOG_HINT = 'Logarithmic scale';

/** The number of panels created in this page: each has a separate cursor, which its charts share. */
let numPanels = 0;

/** Time limit for the kernel's answer with a CSV: a million steps take seconds. */
const CSV_TIMEOUT_MS = 15_000;

const MAX_PRINTED_LINES = 40;

/** Width in pixels below which the memory charts are under the chart. */
const NARROW = 620;

/** Create a live view of `model` in `host`; aborting `signal` removes it. `send` receives the user's actions. */
export function showPanel(
  model: PanelModel,
  host: HTMLElement,
  send: (action: Action) => void,
  signal: AbortSignal
): void {
  new PanelView(model, host, send, signal);
}

class PanelView {
  constructor(
    private readonly model: PanelModel,
    private readonly host: HTMLElement,
    send: (action: Action) => void,
    signal: AbortSignal
  ) {
    this.compare = toggleButton(
      'compare',
      'Draw earlier runs of this notebook too',
      isOn => this.setComparing(isOn),
      signal
    );
    this.log = toggleButton(
      'log',
      LOG_HINT,
      isOn => {
        this.curve.chart.setLogScale(isOn);
        this.schedule();
      },
      signal
    );
    this.notification = new EndNotification(signal);
    const controls = element(
      'div',
      'accel-nb-controls',
      this.chooser,
      chooser('Horizontal axis', AXES, value => this.setAxis(value as AxisName), signal),
      chooser('Smoothing', SMOOTHINGS, value => this.setSmoothing(value), signal),
      this.log,
      toggleButton(
        'focus',
        'Leave outliers out of the range',
        isOn => this.curve.chart.setFocus(isOn),
        signal
      ),
      this.compare,
      toggleButton(
        'pause',
        'Stop drawing; the run continues',
        isOn => this.setPaused(isOn),
        signal
      ),
      this.notification.node,
      ...this.copyButtons(signal),
      actionButton('PNG', 'Save the chart as a picture', () => void this.savePicture(), signal),
      actionButton(
        'HTML',
        'Save the run as one HTML file to share: charts, options, environment and every step',
        () => this.model.query({ kind: 'share' }),
        signal
      ),
      actionButton('CSV', 'Save every step of every curve', () => void this.saveNumbers(), signal)
    );
    this.header = new Header(controls);
    this.runControls = new RunControls(send, signal);
    this.blocks = new BlockSection(model);
    this.earlier = new EarlierList(model.earlier, signal);
    this.root.append(
      this.header.node,
      this.runControls.node,
      this.earlier.node,
      this.body,
      this.more,
      this.use,
      this.blocks.node,
      this.notes,
      this.printed
    );
    this.root.setAttribute('role', 'region');
    this.printed.setAttribute('aria-label', 'Printed since the page was loaded');
    host.append(this.root);

    const theme = readTheme(this.root);
    const cursor = `accel-nb-${++numPanels}`;
    this.curve = new CurveSection(model, theme, signal, cursor);
    this.others = new SmallCharts(model, theme, signal, cursor);
    this.utilization = new SmallCharts(model, theme, signal, cursor);
    this.more.open = true;
    this.more.append(this.moreTitle, this.others.node);
    this.use.append(
      element('summary', 'accel-nb-more-title', 'utilization'),
      this.utilization.node
    );
    for (const group of [this.more, this.use]) {
      group.addEventListener('toggle', () => this.schedule(), { signal });
    }
    this.memory = new MemorySection(model, theme, send, signal);
    this.body.append(this.curve.node, this.memory.node);

    this.chooser.title = 'What to draw';
    this.chooser.setAttribute('aria-label', 'What to draw');
    this.chooser.addEventListener(
      'change',
      () => {
        this.hasChosen = true;
        this.schedule();
      },
      { signal }
    );
    model.onChange(() => this.onModel(), signal);
    watchTheme(() => {
      this.hasTheme = false;
      this.schedule();
    }, signal);
    const timer = setInterval(() => this.schedule(), 1000); // the elapsed time changes without messages too
    const resized = new ResizeObserver(() => this.schedule());
    resized.observe(this.root);
    signal.addEventListener('abort', () => {
      clearInterval(timer);
      resized.disconnect();
      cancelAnimationFrame(this.frame);
      this.curve.chart.dispose();
      this.others.dispose();
      this.utilization.dispose();
      this.memory.dispose();
      this.root.remove();
    });
    this.onModel();
  }

  private setPaused(isPaused: boolean): void {
    this.isPaused = isPaused;
    this.schedule();
  }

  private setAxis(name: AxisName): void {
    this.curve.axisName = name;
    this.others.setAxis(name);
    this.utilization.setAxis(name);
    this.schedule();
  }

  private setComparing(isOn: boolean): void {
    this.curve.compares = isOn;
    this.earlier.node.hidden = !isOn;
    if (isOn) {
      this.model.earlier.list();
    }
    this.schedule();
  }

  private setSmoothing(choice: string): void {
    this.smoothing = choice === 'auto' ? null : Number(choice);
    this.curve.smoothing = this.smoothing;
    this.others.setSmoothing(this.smoothing);
    this.utilization.setSmoothing(this.smoothing);
    this.schedule();
  }

  /** Save the kernel's CSV of every step; without a kernel, as in a saved notebook, save the rows in the browser. */
  private async saveNumbers(): Promise<void> {
    const answer = await this.model.queryCsv(CSV_TIMEOUT_MS);
    if (answer !== null && answer.file !== null) {
      this.fileNote = `saved as ${answer.file} in the notebook's folder`;
      this.schedule();
      return;
    }
    const isWhole = answer !== null && answer.text !== null;
    const text = isWhole ? answer.text : toCsv(this.curve.axis.label, this.curve.chart.columns());
    const title = this.model.facts?.title ?? '';
    const name = fileName(isWhole ? title : `${this.chartTitle()}, points shown`, 'csv');
    download(new Blob([text], { type: 'text/csv' }), name);
  }

  private async savePicture(): Promise<void> {
    const picture = await this.drawPicture();
    if (picture !== null) {
      download(picture, fileName(this.chartTitle(), 'png'));
    }
  }

  /** The button that copies the chart; none where the page may not write pictures into the clipboard. */
  private copyButtons(signal: AbortSignal): HTMLElement[] {
    if (typeof ClipboardItem === 'undefined' || navigator.clipboard === undefined) {
      return [];
    }
    const copy = async (): Promise<void> => {
      const picture = await this.drawPicture();
      if (picture !== null) {
        try {
          await navigator.clipboard.write([new ClipboardItem({ [picture.type]: picture })]);
          this.fileNote = 'the chart is in the clipboard';
        } catch {
          this.fileNote =
            'not copied: the browser does not allow this page to write to the clipboard';
        }
        this.schedule();
      }
    };
    return [actionButton('copy', 'Copy the chart as a picture', () => void copy(), signal)];
  }

  private async drawPicture(): Promise<Blob | null> {
    const { chart } = this.curve;
    if (chart.canvas === null) {
      return null;
    }
    const background = getComputedStyle(this.root).backgroundColor;
    const theme = readTheme(this.root);
    return toPng(chart.canvas, this.chartTitle(), chart.legend(), theme, background);
  }

  private chartTitle(): string {
    const curve = this.chosenCurve()?.label ?? 'chart';
    return `${capText(curve, 40)}, ${this.model.facts?.title ?? ''}`;
  }

  private onModel(): void {
    // For tests, which check that every point has arrived.
    this.root.dataset.points = String(this.model.numPoints);
    this.root.dataset.seq = String(this.model.seq);
    this.root.dataset.status = this.model.facts?.status ?? 'waiting';
    if (this.model.facts !== null) {
      this.notification.update(this.model.facts);
    }
    const step = this.model.facts?.step ?? 0;
    if (step !== this.step) {
      this.step = step;
      this.steppedAt = performance.now();
    }
    this.schedule();
  }

  private applyTheme(): void {
    const theme = readTheme(this.root);
    this.curve.chart.setTheme(theme);
    this.others.setTheme(theme);
    this.utilization.setTheme(theme);
    this.memory.setTheme(theme);
  }

  /** Draw at most once a frame; a hidden page has no frames. */
  private schedule(): void {
    if (this.frame === 0) {
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.draw();
      });
    }
  }

  private draw(): void {
    const { facts } = this.model;
    if (facts === null || !this.host.isConnected) {
      return;
    }
    if (!this.hasTheme) {
      this.hasTheme = true; // before the host is in the page, its computed style has no colors
      this.applyTheme();
    }
    this.root.setAttribute('aria-label', `Training run ${facts.title}`);
    const idleS = facts.status === 'running' ? (performance.now() - this.steppedAt) / 1000 : 0;
    this.header.update(facts, idleS >= 1 ? idleS : 0);
    this.runControls.update(facts);
    this.compare.hidden = facts.numEarlier === 0;
    this.earlier.update();
    this.blocks.update();
    const waitNotes =
      idleS >= Math.max(MIN_WAIT_S, (3 * (facts.stepMs ?? 0)) / 1000) && facts.step > 0
        ? [`no step for ${formatSeconds(Math.floor(idleS))}`]
        : [];
    const saved = [this.fileNote, sharedText(this.model.sharedFile)].filter(text => text !== '');
    setText(this.notes, [...waitNotes, ...facts.notes, ...saved].join('  ·  '));
    const printed = printedText(this.model.text);
    setText(this.printed, isInOutput(printed, this.host) ? '' : printed);
    if (this.isPaused) {
      return;
    }
    const isBeside = this.root.clientWidth >= NARROW && this.memory.fitsBeside;
    this.root.classList.toggle('accel-nb-is-stacked', !isBeside);
    const curve = this.chosenCurve();
    this.curve.node.hidden = curve === null;
    this.memory.draw(MAPS_HEIGHT, isBeside);
    this.curve.draw(curve, CHART_HEIGHT);
    this.drawOthers(curve);
    this.proposeLogScale(curve);
  }

  private drawOthers(chosen: ICurve | null): void {
    // Validation losses are drawn with their training loss.
    const names = this.model.facts?.utilization ?? [];
    const isUse = (curve: ICurve): boolean =>
      curve.table === 'metric' && names.includes(curve.name);
    const used = this.model.curves().filter(isUse);
    this.use.hidden = used.length === 0;
    if (this.use.open) {
      this.utilization.draw(used);
    }
    const others = this.model
      .curves()
      .filter(
        curve =>
          !isUse(curve) && curve.id !== chosen?.id && this.model.validatedLoss(curve) === null
      )
      .filter(isVarying);
    this.more.hidden = others.length === 0;
    setText(this.moreTitle, others.length === 1 ? '1 more curve' : `${others.length} more curves`);
    if (this.more.open) {
      this.others.draw(others);
    }
  }

  /** Highlight the button of the logarithmic scale if the values span two decades or more. */
  private proposeLogScale(curve: ICurve | null): void {
    const isOn = this.log.getAttribute('aria-pressed') === 'true';
    const spans = !isOn && curve !== null && spansDecades(curve);
    this.log.classList.toggle('accel-nb-is-proposed', spans);
    this.log.title = spans ? `${LOG_HINT}: the values span more than two decades` : LOG_HINT;
  }

  private chosenCurve(): ICurve | null {
    const curves = this.model.curves();
    const names = curves.map(curve => curve.id).join('\n');
    if (names !== this.chooserNames) {
      this.chooserNames = names;
      const chosen = this.chooser.value;
      this.chooser.replaceChildren(
        ...curves.map(curve => {
          const option = element('option', '', capText(curve.label, 40));
          option.value = curve.id;
          return option;
        })
      );
      // A metric may arrive before the first loss, which is then drawn instead, unless the user has chosen a curve.
      const keepsChoice = this.hasChosen && curves.some(curve => curve.id === chosen);
      this.chooser.value = keepsChoice ? chosen : (curves[0]?.id ?? '');
    }
    return curves.find(curve => curve.id === this.chooser.value) ?? null;
  }

  private readonly root = element('div', 'accel-nb-panel');
  private readonly body = element('div', 'accel-nb-body');
  private readonly notes = element('div', 'accel-nb-notes');
  private readonly printed = element('pre', 'accel-nb-printed');
  private readonly chooser = element('select', 'accel-nb-select');
  private readonly header: Header;
  private readonly notification: EndNotification;
  private readonly runControls: RunControls;
  private readonly compare: HTMLButtonElement;
  private readonly earlier: EarlierList;
  private readonly blocks: BlockSection;
  private readonly curve: CurveSection;
  private readonly others: SmallCharts;
  private readonly utilization: SmallCharts;
  private readonly log: HTMLButtonElement;
  private readonly more = element('details', 'accel-nb-more-curves');
  /** Charts of how much each rank computes, closed by default. */
  private readonly use = element('details', 'accel-nb-more-curves accel-nb-utilization');
  private readonly moreTitle = element('summary', 'accel-nb-more-title');
  private smoothing: number | null = null;
  private readonly memory: MemorySection;
  private hasChosen = false;
  private fileNote = '';
  private chooserNames = '';
  private hasTheme = false;
  private isPaused = false;
  private step = 0;
  private steppedAt = performance.now();
  private frame = 0;
}

/** The text as a terminal shows it: the part of each line after its last carriage return. */
function printedText(text: string): string {
  return text
    .replace(/\r\n/g, '\n')
    .split('\n')
    .map(line => line.slice(line.lastIndexOf('\r') + 1))
    .slice(-MAX_PRINTED_LINES)
    .join('\n')
    .trimEnd();
}

function sharedText(file: string | null): string {
  if (file === null) {
    return '';
  }
  return file === ''
    ? 'not saved: the kernel no longer has the rows of this run'
    : `saved as ${file} in the notebook's folder`;
}

/** Whether the text's last line is in the cell's other outputs, as it is in the page that started the cell. */
function isInOutput(text: string, host: HTMLElement): boolean {
  const last = text.slice(text.lastIndexOf('\n') + 1);
  const area = host.closest('.jp-OutputArea, .output'); // the second is the classic notebook's
  const outputs = area?.querySelectorAll('.jp-OutputArea-output, .output_area') ?? [];
  return [...outputs].some(
    output => !output.contains(host) && (output.textContent ?? '').includes(last)
  );
}
