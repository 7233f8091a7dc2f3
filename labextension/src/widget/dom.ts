/** Elements made of fixed tags, classes and text; nothing here parses HTML. */

export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  className: string,
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

/** Set the text only when it differs: an unchanged text keeps the reader's selection and costs no layout. */
export function setText(target: HTMLElement, text: string): void {
  if (target.textContent !== text) {
    target.textContent = text;
  }
}

/** A button that stays pressed; `onToggle` gets the new state. */
export function toggleButton(
  label: string,
  hint: string,
  onToggle: (isOn: boolean) => void,
  signal: AbortSignal
): HTMLButtonElement {
  const button = element('button', 'accel-nb-button', label);
  button.type = 'button';
  button.title = hint;
  button.setAttribute('aria-pressed', 'false');
  button.addEventListener(
    'click',
    () => {
      const isOn = button.getAttribute('aria-pressed') !== 'true';
      button.setAttribute('aria-pressed', String(isOn));
      onToggle(isOn);
    },
    { signal }
  );
  return button;
}
