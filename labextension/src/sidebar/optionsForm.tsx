/** The form of options: JupyterLab's form component with the generated schema, one for each group. */

import type { ITranslator, TranslationBundle } from '@jupyterlab/translation';
import { FormComponent, type IFormComponentProps } from '@jupyterlab/ui-components';
import type { ReadonlyJSONObject } from '@lumino/coreutils';
import { useState } from 'react';
import { magicLine } from '../model/cellLine';
import {
  OPTIONS,
  OPTION_BY_FLAG,
  OPTION_GROUPS,
  type IOption,
  type IOptionGroup
} from '../model/options';
import { problemsByOption, type IResolution } from '../model/sidebarState';
import { OptionField, type IFieldContext } from './optionField';
import { Action, Choice, Hints, Section, Words, schemaText } from './parts';
import type { NotebookSession, Scope } from './session';
import type { IViewProps } from './viewProps';

/** Accept every value: only the kernel checks them. */
const UNCHECKED: IFormComponentProps['validator'] = {
  isValid: () => true,
  rawValidation: () => ({}),
  toErrorList: () => [],
  validateFormData: () => ({ errors: [], errorSchema: {} })
};

const TEMPLATES = { FieldTemplate: OptionField } as IFormComponentProps['templates'];

type Problems = ReadonlyMap<string, readonly string[]>;

export function OptionsForm({
  session,
  trans,
  translator
}: IViewProps & { readonly translator: ITranslator }): React.JSX.Element {
  const [wanted, setWanted] = useState('');
  const { resolution, values } = session;
  const problems = problemsByOption(
    resolution?.problems ?? [],
    word => (OPTIONS.get(word) ?? OPTION_BY_FLAG.get(word))?.name
  );
  const shared = { session, trans, translator, problems, resolution };
  return (
    <Section
      title={trans.__('Options')}
      aside={
        <Choice<Scope>
          label={trans.__('Scope of the options')}
          options={[
            { value: 'cell', label: trans.__('Cell') },
            { value: 'notebook', label: trans.__('Notebook') }
          ]}
          chosen={session.scope}
          onChoose={scope => {
            session.scope = scope;
          }}
        />
      }
    >
      <Target session={session} trans={trans} />
      <Hints isProblem texts={problems.get('') ?? []} />
      <Hints texts={[...deviceTexts(resolution, trans), ...(resolution?.notes ?? [])]} />
      <input
        className="accel-nb-find jp-mod-styled"
        type="search"
        value={wanted}
        placeholder={trans.__('Find an option')}
        aria-label={trans.__('Find an option')}
        onChange={event => setWanted(event.target.value)}
      />
      {values !== null &&
        (wanted.trim() === '' ? (
          OPTION_GROUPS.map(group => (
            <Group key={group.name} group={group} values={values} {...shared} />
          ))
        ) : (
          <Found wanted={wanted} values={values} {...shared} />
        ))}
    </Section>
  );
}

interface IGroupProps {
  readonly session: NotebookSession;
  readonly trans: TranslationBundle;
  readonly translator: ITranslator;
  readonly values: ReadonlyMap<string, string>;
  readonly problems: Problems;
  readonly resolution: IResolution | null;
}

function Target({ session, trans }: IViewProps): React.JSX.Element {
  if (session.scope === 'notebook') {
    return (
      <p className="accel-nb-hint">
        {trans.__(
          'Saved in this notebook, for all its cells. The options in the line of a cell override these.'
        )}
      </p>
    );
  }
  const line = session.line;
  const isLine = line?.kind === 'line';
  return (
    <div className="accel-nb-target">
      <code data-line>
        <Words text={magicLine(session.flags)} />
      </code>
      {session.values === null && (
        <Hints
          isProblem
          texts={[trans.__('A quotation mark in the line is never closed: close it in the cell.')]}
        />
      )}
      {isLine ? (
        <p className="accel-nb-hint">
          {trans.__('The line of the active cell; both change together.')}
        </p>
      ) : (
        <div className="accel-nb-actions">
          <Action
            isMain
            label={
              line?.kind === 'none' ? trans.__('Insert into cell') : trans.__('Insert a new cell')
            }
            onClick={() => session.insert()}
          />
        </div>
      )}
    </div>
  );
}

function Group({
  group,
  ...props
}: IGroupProps & { readonly group: IOptionGroup }): React.JSX.Element {
  const [isOpen, setOpen] = useState(group.name === 'training');
  const numGiven = group.options.filter(option => props.values.has(option.name)).length;
  const numWrong = group.options.filter(option => props.problems.has(option.name)).length;
  return (
    <details
      className="accel-nb-group"
      data-group={group.name}
      open={isOpen}
      onToggle={event => setOpen(event.currentTarget.open)}
    >
      <summary title={schemaText(group.description, props.trans)}>
        <span>{schemaText(group.title, props.trans)}</span>
        {numWrong > 0 && <span className="accel-nb-badge accel-nb-mod-wrong">{numWrong}</span>}
        {numGiven > 0 && <span className="accel-nb-badge">{numGiven}</span>}
      </summary>
      {isOpen && <Fields options={group.options} idPrefix={group.name} {...props} />}
    </details>
  );
}

function Found({ wanted, ...props }: IGroupProps & { readonly wanted: string }): React.JSX.Element {
  const options = matching(wanted);
  return options.length === 0 ? (
    <p className="accel-nb-hint">{props.trans.__('No option has this in its name or text.')}</p>
  ) : (
    <Fields options={options} idPrefix="found" isAlone {...props} />
  );
}

function Fields({
  options,
  idPrefix,
  session,
  trans,
  translator,
  values,
  problems,
  resolution,
  isAlone = false
}: IGroupProps & {
  readonly options: readonly IOption[];
  readonly idPrefix: string;
  readonly isAlone?: boolean;
}): React.JSX.Element {
  const data: Record<string, string> = {};
  for (const option of options) {
    const value = values.get(option.name);
    if (value !== undefined) {
      data[option.name] = value;
    }
  }
  const context: IFieldContext = { trans, values, problems, resolution, isAlone };
  return (
    <FormComponent
      tagName="div"
      className="accel-nb-fields"
      idPrefix={`accel-nb-${idPrefix}`}
      schema={formSchema(options, values)}
      uiSchema={placeholders(options, resolution, trans)}
      formData={data}
      formContext={context}
      templates={TEMPLATES}
      validator={UNCHECKED}
      translator={translator}
      noValidate
      onChange={({ formData }) => {
        const chosen = formData as ReadonlyJSONObject;
        for (const { name } of options) {
          const value = chosen[name] as string | undefined;
          if (value !== data[name]) {
            session.choose(name, value);
          }
        }
      }}
    />
  );
}

/** The schema of the form: text fields, with a list for options that have choices. */
function formSchema(options: readonly IOption[], values: ReadonlyMap<string, string>): object {
  const properties = options.map(option => {
    const value = values.get(option.name);
    const isOther = value !== undefined && !option.choices.includes(value);
    const choices = isOther ? [...option.choices, value] : option.choices;
    const closed = option.choices.length > 0 ? { enum: choices } : {};
    return [option.name, { type: 'string', title: option.name, ...closed }] as const;
  });
  return { type: 'object', properties: Object.fromEntries(properties) };
}

/** Placeholders for options that are not set in the form: the value of a weaker layer, or the default. */
function placeholders(
  options: readonly IOption[],
  resolution: IResolution | null,
  trans: TranslationBundle
): NonNullable<IFormComponentProps['uiSchema']> {
  const pairs = options.map(option => {
    const text = resolution?.options.get(option.name)?.value ?? option.defaultText;
    const isList = option.choices.length > 0;
    const isNothing = text === '' || text === 'none';
    // Without "not set" the list would show the same entry twice.
    const value = isList ? trans.__('not set: %1', text) : text;
    const shown = isNothing ? (isList ? '' : option.hint) || trans.__('not set') : value;
    return [option.name, { 'ui:placeholder': shown, 'ui:autocomplete': 'off' }] as const;
  });
  return Object.fromEntries(pairs);
}

function matching(wanted: string): IOption[] {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  return [...OPTIONS.values()].filter(option => {
    const text = `${option.name} --${option.flag} ${option.description}`.toLowerCase();
    return words.every(word => text.includes(word));
  });
}

function deviceTexts(resolution: IResolution | null, trans: TranslationBundle): string[] {
  const devices = resolution?.devices ?? [];
  if (devices.length === 0) {
    return [];
  }
  const kinds = [...new Set(devices.map(device => device.replace(/:\d+$/, '')))].join(', ');
  return [trans._n('Runs on %1 worker: %2', 'Runs on %1 workers: %2', devices.length, kinds)];
}
