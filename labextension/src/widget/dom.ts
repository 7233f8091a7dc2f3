/** Functions that create and update DOM elements; none parses HTML. */

export function element<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  className: string,
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const created = document.createElement(tag);
  created.className = className;
  created.append(...children);
  return created;
}

/** Set the text if it differs: an unchanged text keeps the selection and needs no layout. */
export function setText(target: HTMLElement, text: string): void {
  if (target.textContent !== text) {
    target.textContent = text;
  }
}

/** Set a legend swatch to the color and the dashes of its curve. */
export function paintSwatch(swatch: HTMLElement, color: string, isDashed: boolean): void {
  swatch.style.color = color;
  swatch.classList.toggle('accel-nb-is-dashed', isDashed);
}

/** A toggle button; `onToggle` receives the new state. */
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

/** A button that calls `onClick`. */
export function actionButton(
  label: string,
  hint: string,
  onClick: () => void,
  signal: AbortSignal
): HTMLButtonElement {
  const button = element('button', 'accel-nb-button', label);
  button.type = 'button';
  button.title = hint;
  button.addEventListener('click', onClick, { signal });
  return button;
}

/** A drop-down list whose first choice is selected; `onChoose` receives the selected value. */
export function chooser(
  name: string,
  choices: readonly { readonly value: string; readonly label: string }[],
  onChoose: (value: string) => void,
  signal: AbortSignal
): HTMLSelectElement {
  const select = element('select', 'accel-nb-select');
  select.title = name;
  select.setAttribute('aria-label', name);
  for (const { value, label } of choices) {
    const option = element('option', '', label);
    option.value = value;
    select.append(option);
  }
  select.addEventListener('change', () => onChoose(select.value), { signal });
  return select;
}
