/** A chart as a file: its numbers as CSV, its picture as PNG. */

import type { ITheme } from './theme';

export interface IColumn {
  readonly label: string;
  readonly xs: ArrayLike<number>;
  readonly ys: ArrayLike<number>;
}

/** One row for each place that any column has; numbers as JavaScript writes them, so that nothing is lost. */
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

/** A text that a spreadsheet takes for a text: quoted, and no formula. */
function quoted(text: string): string {
  const plain = /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r]/.test(plain) ? `"${plain.replace(/"/g, '""')}"` : plain;
}

/** The chart on the page's own background, with a title above. */
export function toPng(
  chart: HTMLCanvasElement,
  title: string,
  theme: ITheme,
  background: string
): Promise<Blob | null> {
  const ratio = window.devicePixelRatio || 1;
  const top = Math.round(24 * ratio);
  const canvas = document.createElement('canvas');
  canvas.width = chart.width;
  canvas.height = chart.height + top;
  const context = canvas.getContext('2d');
  if (context === null) {
    return Promise.resolve(null);
  }
  context.fillStyle = background;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = theme.ink;
  context.font = `${Math.round(13 * ratio)}px sans-serif`;
  context.fillText(title, Math.round(8 * ratio), Math.round(17 * ratio));
  context.drawImage(chart, 0, top);
  return new Promise(resolve => canvas.toBlob(resolve, 'image/png'));
}

/** Hand a file to the browser's own download. */
export function download(content: Blob, name: string): void {
  const link = document.createElement('a');
  const address = URL.createObjectURL(content);
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A file name out of a text that somebody chose. */
export function fileName(text: string, extension: string): string {
  const safe = text.replace(/[^\p{L}\p{N}_-]+/gu, '-').replace(/^-+|-+$/g, '');
  return `${safe.slice(0, 80) || 'chart'}.${extension}`;
}
