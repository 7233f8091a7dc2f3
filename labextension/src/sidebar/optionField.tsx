/** One option in the form: its name, where its value comes from, the input, what it means and what is wrong with it. */

import type { TranslationBundle } from '@jupyterlab/translation';
import type { ReactNode } from 'react';
import { OPTIONS } from '../model/options';
import type { IResolution } from '../model/sidebarState';
import { schemaText } from './parts';

export interface IFieldContext {
  readonly trans: TranslationBundle;
  readonly values: ReadonlyMap<string, string>;
  readonly problems: ReadonlyMap<string, readonly string[]>;
  readonly resolution: IResolution | null;
  /** Whether the field stands among those of other groups, so that it needs its whole name. */
  readonly isAlone: boolean;
}

/** What the form component hands to the template of a field. */
interface IFieldProps {
  readonly id: string;
  readonly label: string;
  readonly children: ReactNode;
  readonly schema: { readonly type?: unknown };
  readonly formContext: IFieldContext;
}

export function OptionField({
  id,
  label,
  children,
  schema,
  formContext
}: IFieldProps): React.JSX.Element {
  const option = OPTIONS.get(label);
  if (schema.type === 'object' || option === undefined) {
    return <>{children}</>;
  }
  const { trans, values, problems, resolution, isAlone } = formContext;
  const found = resolution?.options.get(option.name);
  const wrong = problems.get(option.name) ?? [];
  const isDefault = found === undefined || found.layer === 'default';
  return (
    <div
      className="accel-nb-field"
      data-option={option.name}
      data-origin={found?.layer ?? 'default'}
      data-given={values.has(option.name)}
    >
      <div className="accel-nb-line">
        <label htmlFor={id}>{isAlone ? option.name : option.name.split('.').pop()}</label>
        {!isDefault && (
          <span className="accel-nb-origin" title={found.source}>
            {layerText(found.layer, trans)}
          </span>
        )}
      </div>
      {children}
      <p className="accel-nb-field-help" id={`${id}__description`}>
        {schemaText(option.description, trans)}
        {option.unit !== '' && ` [${option.unit}]`}
      </p>
      {!isDefault && !values.has(option.name) && (
        <p className="accel-nb-field-source" id={`${id}__help`}>
          {trans.__('from %1', found.source)}
        </p>
      )}
      {wrong.length > 0 && (
        <p className="accel-nb-field-problem" id={`${id}__error`} role="alert">
          {wrong.join('\n')}
        </p>
      )}
    </div>
  );
}

function layerText(layer: string, trans: TranslationBundle): string {
  switch (layer) {
    case 'file':
      return trans.__('file');
    case 'environment':
      return trans.__('environment');
    case 'notebook':
      return trans.__('notebook');
    case 'flags':
      return trans.__('cell');
    default:
      return layer;
  }
}
