/** The page's colors for canvas drawing, read from the custom properties of the widget's style sheet. */

export interface ITheme {
  readonly ink: string;
  readonly faintInk: string;
  readonly grid: string;
  readonly font: string;
}

const FALLBACK: ITheme = {
  ink: '#1f2328',
  faintInk: '#656d76',
  grid: '#e4e7eb',
  font: '11px system-ui, sans-serif'
};

export function readTheme(element: Element): ITheme {
  const style = getComputedStyle(element);
  const value = (name: string, fallback: string) => style.getPropertyValue(name).trim() || fallback;
  return {
    ink: value('--accel-nb-ink', FALLBACK.ink),
    faintInk: value('--accel-nb-faint-ink', FALLBACK.faintInk),
    grid: value('--accel-nb-grid', FALLBACK.grid),
    font: `11px ${value('--accel-nb-font', 'system-ui, sans-serif')}`
  };
}

/** Call `onChange` whenever the page switches between light and dark, until `signal` aborts. */
export function watchTheme(onChange: () => void, signal: AbortSignal): void {
  const observer = new MutationObserver(onChange);
  const attributeFilter = [
    'data-jp-theme-light',
    'data-jp-theme-name',
    'data-vscode-theme-kind',
    'theme',
    'class'
  ];
  observer.observe(document.body, { attributes: true, attributeFilter });
  observer.observe(document.documentElement, { attributes: true, attributeFilter });
  signal.addEventListener('abort', () => observer.disconnect());
  if (typeof matchMedia === 'function') {
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', onChange, { signal });
  }
}
