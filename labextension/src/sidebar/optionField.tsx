/** One option in the form: its name, the origin of its value, the input, the help text and problems. */

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
  /** Whether the field is shown outside of its group, and therefore with its full name. */
  readonly isAlone: boolean;
}

/** Props that the form component passes to the template of a field. */
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
  const resolved = resolution?.options.get(option.name);
  const ownProblems = problems.get(option.name) ?? [];
  const isDefault = resolved === undefined || resolved.layer === 'default';
  return (
    <div
      className="accel-nb-field"
      data-option={option.name}
      data-origin={resolved?.layer ?? 'default'}
      data-given={values.has(option.name)}
    >
      <div className="accel-nb-line">
        <label htmlFor={id}>{isAlone ? option.name : option.name.split('.').pop()}</label>
        {!isDefault && (
          <span className="accel-nb-origin" title={resolved.source}>
            {layerText(resolved.layer, trans)}
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
          {trans.__('from %1', resolved.source)}
        </p>
      )}
      {ownProblems.length > 0 && (
        <p className="accel-nb-field-problem" id={`${id}__error`} role="alert">
          {ownProblems.join('\n')}
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
