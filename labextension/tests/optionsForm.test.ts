import { describe, expect, it } from 'vitest';
import { editLine, findLine, magicLine } from '../src/model/cellLine';
import { flagText, readValues, splitWords, withValue } from '../src/model/flags';
import { OPTIONS, OPTION_GROUPS, valueText } from '../src/model/options';
import { readSettings, writeSettings } from '../src/model/settings';

describe('the options', () => {
  it('are grouped as in the generated schema', () => {
    const names = OPTION_GROUPS.map(group => group.name);
    expect(names.slice(0, 2)).toEqual(['training', 'cell']);
    expect(names).toContain('checkpoint');
    expect(OPTION_GROUPS.every(group => group.options.length > 0)).toBe(true);
  });

  it('have closed choices where the schema has', () => {
    expect(OPTIONS.get('precision')?.choices).toContain('bf16');
    expect(OPTIONS.get('panel')?.choices).toEqual(['on', 'off']);
    expect(OPTIONS.get('batch')?.choices).toEqual(['per-worker', 'global', 'none']);
    expect(OPTIONS.get('gpus')?.choices).toEqual([]);
    expect(OPTIONS.get('checkpoint.dir')?.flag).toBe('checkpoint');
  });
});

describe('splitWords', () => {
  it.each([
    [`a  'b c' "d \\" \\\\ \\n"`, ['a', 'b c', 'd " \\ \\n']],
    [`--name='it'"'"'s' x\\ y ''`, ["--name=it's", 'x y', '']],
    ['', []]
  ])('splits %s as a shell does', (line, words) => {
    expect(splitWords(line)?.map(word => word.text)).toEqual(words);
  });

  it.each([`"a`, `a 'b`, `a \\`])('says that %s is never closed', line => {
    expect(splitWords(line)).toBeNull();
  });
});

describe('readValues', () => {
  it('reads the values of known flags', () => {
    const values = readValues(`--cpus 2 --precision=bf16 --no-panel --static --name 'my run' --what 3`);
    expect(Object.fromEntries(values ?? [])).toEqual({
      cpus: '2',
      precision: 'bf16',
      panel: 'off',
      static: 'on',
      name: 'my run'
    });
  });

  it('reads a negative number as a value, and a flag as a flag', () => {
    expect(Object.fromEntries(readValues('--seed -3 --clip --cpus 2') ?? [])).toEqual({
      seed: '-3',
      cpus: '2'
    });
  });
});

describe('withValue', () => {
  const LINE = `--whatever  "x  y" --cpus 2   --precision='bf16'  # kept`;

  it('replaces a value in place and changes nothing else', () => {
    expect(withValue(LINE, 'cpus', '4')).toBe(LINE.replace('--cpus 2', '--cpus 4'));
    expect(withValue(LINE, 'precision', 'no')).toBe(
      LINE.replace(`--precision='bf16'`, '--precision no')
    );
  });

  it('appends a flag, and removes one with the blank before it', () => {
    // What follows the comment's sign is no flag.
    expect(withValue(LINE, 'seed', '1')).toBe(LINE.replace('  # kept', ' --seed 1  # kept'));
    expect(withValue('# two', 'cpus', '2')).toBe('--cpus 2  # two');
    expect(readValues('--cpus 2 # --seed 1')).toEqual(new Map([['cpus', '2']]));
    expect(withValue("--name a#b --cpus '#'", 'seed', '1')).toBe("--name a#b --cpus '#' --seed 1");
    expect(withValue(LINE, 'cpus', undefined)).toBe(LINE.replace(' --cpus 2', ''));
    expect(withValue('--cpus 2  --seed 1', 'cpus', undefined)).toBe('--seed 1');
    expect(withValue('', 'cpus', '2')).toBe('--cpus 2');
    expect(withValue(LINE, 'seed', undefined)).toBe(LINE);
  });

  it('keeps one of several repetitions', () => {
    expect(withValue('--cpus 2 --seed 1 --cpus 3', 'cpus', '4')).toBe('--cpus 4 --seed 1');
    expect(withValue('--panel --no-panel', 'panel', 'off')).toBe('--no-panel');
  });

  it('fills in a missing value', () => {
    expect(withValue('--clip --cpus 2', 'clip', '1.0')).toBe('--clip 1.0 --cpus 2');
  });

  it.each(['my run', `it's`, `a "b" $c \\d`, '', '-1', 'x;y', 'ä'])('quotes %j so that it is read', text => {
    const line = withValue('--cpus 2', 'name', text);
    expect(readValues(line ?? '')?.get('name')).toBe(text);
  });

  it('refuses values and lines that cannot be parsed again', () => {
    expect(withValue('--cpus 2', 'name', 'a\nb')).toBeNull();
    expect(withValue('--name "a', 'cpus', '2')).toBeNull();
    expect(withValue('--cpus 2', 'no such option', 'x')).toBeNull();
  });

  it('reads every value back as it was written', () => {
    for (const option of OPTIONS.values()) {
      const value = option.choices[0] ?? `some 'value'`;
      const line = withValue('--unknown "q  r"', option.name, value) ?? '';
      expect(line).toBe(`--unknown "q  r" ${flagText(option, value)}`);
      expect(readValues(line)?.get(option.name)).toBe(value);
      expect(withValue(line, option.name, undefined)).toBe('--unknown "q  r"');
    }
  });
});

describe('the line of a cell', () => {
  it.each([
    ['%%accelerate --cpus 2\nx = 1', '--cpus 2'],
    ['%%accelerate\nx', ''],
    ['\n  %%accelerate   --seed 1  \n', '--seed 1'],
    ['%%accelerate', '']
  ])('is found in %j', (source, flags) => {
    const line = findLine(source);
    expect(line).toMatchObject({ kind: 'line', flags });
  });

  it('is not found elsewhere', () => {
    expect(findLine('x = 1\n%%accelerate')).toEqual({ kind: 'none' });
    expect(findLine('%%time\n%%accelerate')).toEqual({ kind: 'other', magic: '%%time' });
    expect(findLine('%%accelerated --cpus 2')).toEqual({ kind: 'other', magic: '%%accelerated' });
  });

  it.each([
    ['%%accelerate\nx = 1', '%%accelerate --cpus 2\nx = 1'],
    ['%%accelerate --seed 1\nx', '%%accelerate --cpus 2\nx'],
    ['\n%%accelerate   --seed 1 \nx', '\n%%accelerate   --cpus 2\nx'],
    ['x = 1', '%%accelerate --cpus 2\nx = 1'],
    ['', '%%accelerate --cpus 2\n']
  ])('is changed in %j', (source, wanted) => {
    const edit = editLine(source, '--cpus 2');
    expect(edit && source.slice(0, edit.start) + edit.text + source.slice(edit.end)).toBe(wanted);
  });

  it('does not edit a cell with another magic', () => {
    expect(editLine('%%time\nx', '--cpus 2')).toBeNull();
    expect(magicLine('')).toBe('%%accelerate');
  });
});

describe('the settings of a notebook', () => {
  it('are text, nested or dotted', () => {
    const metadata = { options: { seed: 3, panel: false, ddp: { static_graph: true }, pull: ['a', 'b'] } };
    expect(readSettings(metadata)).toEqual({
      seed: '3',
      panel: 'off',
      'ddp.static_graph': 'on',
      pull: 'a,b'
    });
    expect(readSettings('forged')).toEqual({});
    expect(readSettings({ options: [1] })).toEqual({});
  });

  it('keep other metadata, and are removed when empty', () => {
    expect(writeSettings({ other: 1, options: { a: 'b' } }, { seed: '3' })).toEqual({
      other: 1,
      options: { seed: '3' }
    });
    expect(writeSettings({ options: { a: 'b' } }, {})).toBeUndefined();
    expect(valueText(null)).toBe('none');
  });
});
