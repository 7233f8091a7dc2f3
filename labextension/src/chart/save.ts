/** Conversion of a chart to files: its numbers as CSV, its picture as PNG. */

import type { ITheme } from './theme';

export interface IColumn {
  readonly label: string;
  readonly xs: ArrayLike<number>;
  readonly ys: ArrayLike<number>;
}

/** The legend's entry for one line of a chart. */
export interface ILegendEntry {
  readonly label: string;
  readonly color: string;
  readonly isDashed: boolean;
}

/** CSV with a row for each x that occurs in any column; numbers are written without loss of precision. */
export function toCsv(axis: string, columns: readonly IColumn[]): string {
  const rows = new Map<number, string[]>();
  columns.forEach(({ xs, ys }, index) => {
    for (let row = 0; row < xs.length; row++) {
      const x = xs[row]!;
      let cells = rows.get(x);
      if (cells === undefined) {
        cells = columns.map(() => '');
        rows.set(x, cells);
      }
      cells[index] = String(ys[row]);
    }
  });
  const head = [axis, ...columns.map(column => column.label)].map(quoted).join(',');
  const lines = [...rows].sort(([a], [b]) => a - b).map(([x, cells]) => [x, ...cells].join(','));
  return [head, ...lines, ''].join('\n');
}

/** A quoted text that a spreadsheet does not evaluate as a formula. */
function quoted(text: string): string {
  const plain = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(plain) ? `"${plain.replace(/"/g, '""')}"` : plain;
}

const TITLE_HEIGHT = 24;
const LEGEND_HEIGHT = 18;
const SWATCH = 18;

/** The chart on the given background, with a title, and a legend if there is more than one line. */
export function toPng(
  chart: HTMLCanvasElement,
  title: string,
  legend: readonly ILegendEntry[],
  theme: ITheme,
  background: string
): Promise<Blob | null> {
  const ratio = window.devicePixelRatio || 1;
  const canvas = document.createElement('canvas');
  const context = canvas.getContext('2d');
  if (context === null) {
    return Promise.resolve(null);
  }
  const width = chart.width / ratio;
  const positions = legend.length > 1 ? legendPositions(legend, width, context) : [];
  const top = TITLE_HEIGHT + LEGEND_HEIGHT * (1 + (positions[positions.length - 1]?.row ?? -1));
  canvas.width = chart.width;
  canvas.height = chart.height + Math.round(top * ratio);
  context.fillStyle = background;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(chart, 0, Math.round(top * ratio));
  context.scale(ratio, ratio);
  context.fillStyle = theme.ink;
  context.font = '13px sans-serif';
  context.fillText(title, 8, 17);
  context.font = LEGEND_FONT;
  context.lineWidth = 2;
  positions.forEach(({ left, row }, index) => {
    const { label, color, isDashed } = legend[index]!;
    const middle = TITLE_HEIGHT + LEGEND_HEIGHT * (row + 0.5);
    context.strokeStyle = color;
    context.setLineDash(isDashed ? [4, 3] : []);
    context.beginPath();
    context.moveTo(left, middle);
    context.lineTo(left + SWATCH, middle);
    context.stroke();
    context.fillText(label, left + SWATCH + 5, middle + 4);
  });
  return new Promise(resolve => canvas.toBlob(resolve, 'image/png'));
}

const LEGEND_FONT = '11px sans-serif';

/** The positions of a legend's entries, which wrap into as many rows as `width` requires. */
export function legendPositions(
  legend: readonly ILegendEntry[],
  width: number,
  context: Pick<CanvasRenderingContext2D, 'measureText' | 'font'>
): { left: number; row: number }[] {
  context.font = LEGEND_FONT;
  let [left, row] = [8, 0];
  return legend.map(({ label }) => {
    const needed = SWATCH + 5 + context.measureText(label).width;
    if (left > 8 && left + needed > width - 8) {
      [left, row] = [8, row + 1];
    }
    const position = { left, row };
    left += needed + 16;
    return position;
  });
}

/** Download a file by the browser. */
export function download(content: Blob, name: string): void {
  const link = document.createElement('a');
  const address = URL.createObjectURL(content);
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A file name made from any text. */
export function fileName(text: string, extension: string): string {
  const safe = text.replace(/[^\p{L}\p{N}_-]+/gu, '-').replace(/^-+|-+$/g, '');
  return `${safe.slice(0, 80) || 'chart'}.${extension}`;
}
