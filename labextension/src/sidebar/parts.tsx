/** Components that the views share. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { ReactNode } from 'react';

export function Section({
  title,
  children,
  aside
}: {
  readonly title: string;
  readonly children: ReactNode;
  readonly aside?: ReactNode;
}): React.JSX.Element {
  return (
    <section className="accel-nb-part">
      <header>
        <h3>{title}</h3>
        {aside}
      </header>
      {children}
    </section>
  );
}

export function Action({
  label,
  onClick,
  isMain = false,
  isDisabled = false
}: {
  readonly label: string;
  readonly onClick: () => void;
  readonly isMain?: boolean;
  readonly isDisabled?: boolean;
}): React.JSX.Element {
  const className = isMain ? 'jp-mod-styled jp-mod-accept' : 'jp-mod-styled';
  return (
    <button className={className} type="button" onClick={onClick} disabled={isDisabled}>
      {label}
    </button>
  );
}

/** A group of buttons, of which one can be pressed. */
export function Choice<T extends string | number>({
  label,
  options,
  chosen,
  onChoose
}: {
  readonly label: string;
  readonly options: readonly { readonly value: T; readonly label: string }[];
  readonly chosen: T | null;
  readonly onChoose: (value: T) => void;
}): React.JSX.Element {
  return (
    <div className="accel-nb-choice" role="group" aria-label={label}>
      {options.map(option => (
        <button
          key={option.value}
          type="button"
          aria-pressed={option.value === chosen}
          onClick={() => onChoose(option.value)}
        >
          {option.label}
        </button>
      ))}
    </div>
  );
}

export interface IBarPart {
  readonly label: string;
  readonly share: number;
  readonly color: string;
}

/** A bar of shares, side by side; a mark shows `limit` if it is below 1. */
export function Bar({
  parts,
  label,
  limit = 1
}: {
  readonly parts: readonly IBarPart[];
  readonly label: string;
  readonly limit?: number;
}): React.JSX.Element {
  return (
    <div className="accel-nb-bar" role="img" aria-label={label} title={label}>
      {parts.map(part => (
        <span
          key={part.label}
          style={{ width: `${100 * part.share}%`, background: part.color }}
          title={part.label}
        />
      ))}
      {limit < 1 && <i style={{ left: `${100 * limit}%` }} />}
    </div>
  );
}

export function Hints({
  texts,
  isProblem = false
}: {
  readonly texts: readonly string[];
  readonly isProblem?: boolean;
}): React.JSX.Element | null {
  if (texts.length === 0) {
    return null;
  }
  const list = (
    <ul className={isProblem ? 'accel-nb-problems' : 'accel-nb-hints'}>
      {texts.map((text, index) => (
        <li key={index}>{text}</li>
      ))}
    </ul>
  );
  return isProblem ? <div role="alert">{list}</div> : list;
}

/** A line of code that wraps between words, and not at the hyphens of its flags. */
export function Words({ text }: { readonly text: string }): React.JSX.Element {
  return (
    <>
      {text.split(/( +)/).map((word, index) =>
        index % 2 === 0 ? (
          <span key={index} className="accel-nb-word">
            {word}
          </span>
        ) : (
          word
        )
      )}
    </>
  );
}

/** A text of the options' schema, translated to the user's language. */
export function schemaText(text: string, trans: TranslationBundle): string {
  // These texts are extracted for translators from the schema, under this context.
  // eslint-disable-next-line jupyter/no-dynamic-translation
  return trans._p('schema', text);
}
