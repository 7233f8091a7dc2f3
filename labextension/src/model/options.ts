/** The options of a run from the generated schema, in the groups of the sidebar's form. */

import schema from '../generated/options.schema.json';

/** One option. Values are text, as in flags; only the kernel parses and checks them. */
export interface IOption {
  /** The dotted name, such as `checkpoint.dir`. */
  readonly name: string;
  readonly flag: string;
  readonly description: string;
  readonly unit: string;
  readonly isSwitch: boolean;
  /** The values to choose from; empty for free text. */
  readonly choices: readonly string[];
  readonly defaultText: string;
  /** The placeholder of the value in a usage line. */
  readonly hint: string;
}

export interface IOptionGroup {
  readonly name: string;
  readonly title: string;
  readonly description: string;
  readonly options: readonly IOption[];
}

type Node = Readonly<Record<string, unknown>>;

const ROOT = schema as unknown as { properties: Record<string, Node>; $defs: Record<string, Node> };

const SWITCH_CHOICES = ['on', 'off'] as const;

export const OPTION_GROUPS: readonly IOptionGroup[] = readGroups();

export const OPTIONS: ReadonlyMap<string, IOption> = new Map(
  OPTION_GROUPS.flatMap(group => group.options).map(option => [option.name, option])
);

/** Options by flag; switches also by their flag with the prefix `no-`. */
export const OPTION_BY_FLAG: ReadonlyMap<string, IOption> = new Map(
  [...OPTIONS.values()].flatMap(option => [
    [option.flag, option] as const,
    ...(option.isSwitch ? [[`no-${option.flag}`, option] as const] : [])
  ])
);

/** A value of any JSON type as the text of a flag's value. */
export function valueText(value: unknown): string {
  if (value === null || value === undefined) {
    return 'none';
  }
  if (typeof value === 'boolean') {
    return value ? 'on' : 'off';
  }
  if (Array.isArray(value)) {
    return value.map(valueText).join(',');
  }
  return typeof value === 'string' || typeof value === 'number'
    ? String(value)
    : JSON.stringify(value);
}

function readGroups(): IOptionGroup[] {
  const plain = Object.entries(ROOT.properties).filter(([, node]) => !('$ref' in node));
  const ofCell = (node: Node): boolean => node.scope === 'cell';
  const training = plain.filter(([, node]) => !ofCell(node));
  const cell = plain.filter(([, node]) => ofCell(node));
  const sections = Object.entries(ROOT.properties).filter(([, node]) => '$ref' in node);
  return [
    group('training', 'Training', 'Where and how a cell trains.', '', training),
    group('cell', 'Cell', 'How a cell is run and displayed.', '', cell),
    ...sections.map(([name, node]) => {
      const definition = ROOT.$defs[text(node.$ref).split('/').pop() ?? ''] ?? {};
      const about = text(node.description) || text(definition.description);
      const fields = Object.entries((definition.properties ?? {}) as Record<string, Node>);
      return group(name, name, about, `${name}.`, fields);
    })
  ].filter(found => found.options.length > 0);
}

function group(
  name: string,
  title: string,
  description: string,
  prefix: string,
  fields: readonly (readonly [string, Node])[]
): IOptionGroup {
  return {
    name,
    title,
    description: description.replace(/``/g, ''),
    options: fields.map(([leaf, node]) => readOption(prefix + leaf, node))
  };
}

function readOption(name: string, node: Node): IOption {
  const isSwitch = node.type === 'boolean';
  return {
    name,
    flag: text(node.flag) || name.replace(/_/g, '-'),
    description: text(node.description),
    unit: text(node.unit),
    isSwitch,
    choices: isSwitch ? SWITCH_CHOICES : choicesOf(node),
    defaultText: node.default === undefined ? '' : valueText(node.default),
    hint: text(node.metavar) || text(node.allowed)
  };
}

/** The values of an option with a closed list; `none` resets it to its automatic choice. */
function choicesOf(node: Node): string[] {
  const parts = (node.anyOf as readonly Node[] | undefined) ?? [node];
  const isClosed = (part: Node): boolean =>
    'enum' in part || 'const' in part || part.type === 'null';
  if (!parts.every(part => isClosed(part) || part.type === 'boolean')) {
    return [];
  }
  return parts.flatMap(part => {
    if (part.type === 'boolean') {
      return [...SWITCH_CHOICES];
    }
    return part.type === 'null'
      ? ['none']
      : ((part.enum as unknown[]) ?? [part.const]).map(valueText);
  });
}

function text(value: unknown): string {
  return typeof value === 'string' ? value : '';
}
