import { describe, expect, it } from 'vitest';
import { ColumnAxis, STEP_AXIS } from '../src/chart/axis';
import { ColumnTable } from '../src/chart/columns';
import { markText } from '../src/chart/palette';
import { rangeWithoutOutliers, withoutStart } from '../src/chart/range';
import { CurveChart, lastValue, valueAt, type ICurveInput } from '../src/chart/curveChart';
import { fileName, legendPositions, toCsv } from '../src/chart/save';
import { SmoothedColumn } from '../src/chart/smooth';

function table(numColumns: number, ...rows: number[][]): ColumnTable {
  const made = new ColumnTable(numColumns, 1);
  append(made, ...rows);
  return made;
}

function append(target: ColumnTable, ...rows: number[][]): void {
  const columns = Array.from({ length: target.numColumns }, (_, column) =>
    rows.map(row => row[column]!)
  );
  target.append(Float64Array.from(columns.flat()), rows.length);
}

describe('marks', () => {
  it('have a text for each kind', () => {
    const mark = { x: 3, rank: 1, text: 'ValueError' };
    expect(markText({ ...mark, kind: 'failed' })).toBe('rank 1 failed: ValueError');
    expect(markText({ ...mark, kind: 'nan' })).toBe('loss not finite');
    expect(markText({ ...mark, kind: 'control', text: 'learning rate 0.1 -> 0.05' })).toBe(
      'learning rate 0.1 -> 0.05'
    );
  });
});

describe('axes', () => {
  it('are the steps, or a scaled column of the step table', () => {
    const steps = table(3, [1, 0.5, 8], [2, 0.4, 16]);
    const axis = new ColumnAxis('samples', new Map([[0, steps]]), 2, () => 2);
    expect([...STEP_AXIS.positions(0, steps)]).toEqual([1, 2]);
    expect([...axis.positions(0, steps)]).toEqual([16, 32]);
    append(steps, [3, 0.3, 20]);
    expect([...axis.positions(0, steps)]).toEqual([16, 32, 40]);
  });

  it('position a metric by its step, and never decrease', () => {
    const steps = table(3, [1, 0, 8], [2, 0, 16], [3, 0, 12]);
    const metric = table(2, [2, 0.9], [3, 0.95], [9, 0.99]);
    const axis = new ColumnAxis('samples', new Map([[0, steps]]), 2, () => 1);
    expect([...axis.positions(0, metric)]).toEqual([16, 16, 16]);
    expect(axis.positionOf(1)).toBe(8);
  });
});

describe('a chart', () => {
  const theme = { ink: '#000', faintInk: '#555', grid: '#ddd', font: '11px sans-serif' };
  const own = table(2, [1, 4], [2, 8]);
  const other = table(2, [10, 1], [20, 3], [30, 5]);
  const draw = (input: Partial<ICurveInput>) => {
    const chart = new CurveChart(
      document.createElement('div'),
      theme,
      () => undefined,
      () => undefined,
      'cursor'
    );
    chart.draw({
      label: 'loss',
      tables: new Map([[0, own]]),
      column: 1,
      meanRank: -1,
      axis: STEP_AXIS,
      smoothing: 0,
      hidden: new Set<string>(),
      marks: [],
      extra: [],
      ...input
    });
    return chart;
  };
  const extra = {
    label: 'loss',
    table: other,
    column: 1,
    axis: STEP_AXIS,
    color: '#8c6bb1',
    isSmoothed: true,
    isDashed: true
  };

  it('has the columns and legend entries of other runs under unique labels', () => {
    const chart = draw({ extra: [extra, extra] });
    expect(chart.columns().map(({ label, xs }) => [label, [...Array.from(xs)]])).toEqual([
      ['loss (2)', [10, 20, 30]],
      ['loss (3)', [10, 20, 30]],
      ['loss', [1, 2]]
    ]);
    expect(chart.legend()[0]).toEqual({ label: 'loss (2)', color: '#8c6bb1', isDashed: true });
    expect(draw({ extra: [extra], hidden: new Set(['loss (2)']) }).legend()).toHaveLength(1);
  });

  it('has an extra solid line in its legend', () => {
    const chart = draw({ extra: [{ ...extra, label: 'val_loss', isDashed: false }] });
    expect(chart.legend().map(({ label, isDashed }) => [label, isDashed])).toEqual([
      ['val_loss', false],
      ['loss', false]
    ]);
  });

  it('smooths a thinned run over as many steps as the current run', () => {
    const [column] = draw({ extra: [extra], smoothing: 0.9 }).columns();
    const expected = new SmoothedColumn(other, 1, 0.9 ** 10).values();
    expect(column!.label).toBe('loss (2), smoothed');
    expect([...Array.from(column!.ys)]).toEqual([...expected]);
  });

  it('wraps the legend of its picture into rows', () => {
    const entries = ['a', 'b', 'c'].map(label => ({ label, color: '#000', isDashed: false }));
    const context = { font: '', measureText: () => ({ width: 60 }) as TextMetrics };
    expect(legendPositions(entries, 220, context).map(({ row }) => row)).toEqual([0, 0, 1]);
    expect(legendPositions(entries, 10, context).map(({ row }) => row)).toEqual([0, 1, 2]);
  });
});

describe('the range of step times', () => {
  it('excludes the slow first step, however few steps there are', () => {
    expect(rangeWithoutOutliers(withoutStart([10_500, 11, 12, 10]))).toEqual([10, 12]);
    expect(withoutStart([5])).toEqual([5]);
  });
});

describe('a reading', () => {
  it('without a pointer is taken at the last step of the mean, also for a rank that is ahead', () => {
    expect(lastValue([1, 2, 3], [6, 5, 1], 2)).toBe(5);
    expect(lastValue([1, 2, 3], [6, 5, 1], 9)).toBe(1);
    expect(lastValue([1, 2], [6, 5], undefined)).toBe(5);
    expect(lastValue([], [], 2)).toBeNull();
  });

  it('is the value at the pointer, or null', () => {
    expect(valueAt([1, 4, 9], [0.1, 0.4, 0.9], 4)).toBe(0.4);
    expect(valueAt([1, 4, 9], [0.1, 0.4, 0.9], 5)).toBeNull();
  });
});

describe('smoothing', () => {
  it('is the weighted mean of earlier values, without a bias at the start', () => {
    const raw = table(2, [1, 4], [2, 8]);
    const smooth = new SmoothedColumn(raw, 1, 0.5);
    expect([...smooth.values()]).toEqual([4, (0.25 * 4 + 0.5 * 8) / 0.75]);
  });

  it('continues incrementally and skips values that are not finite', () => {
    const rows = [
      [1, 4],
      [2, NaN],
      [3, 8],
      [4, 1]
    ];
    const growing = table(2, rows[0]!);
    const smooth = new SmoothedColumn(growing, 1, 0.9);
    smooth.values();
    append(growing, ...rows.slice(1));
    expect([...smooth.values()]).toEqual([...new SmoothedColumn(growing, 1, 0.9).values()]);
    expect(smooth.values()[1]).toBeNaN();
    expect(smooth.values()[3]).toBeGreaterThan(1);
  });
});

describe('the usual range', () => {
  it('excludes a spike and includes a whole straight line', () => {
    const line = Array.from({ length: 1000 }, (_, index) => index);
    expect(rangeWithoutOutliers(line)).toEqual([0, 999]);
    const [low, high] = rangeWithoutOutliers([...line, 1e9, null, undefined])!;
    expect(low).toBe(0);
    expect(high).toBeLessThan(2000);
    expect(rangeWithoutOutliers([null])).toBeNull();
  });
});

describe('files', () => {
  it('join columns by their positions at full precision', () => {
    const text = toCsv('step', [
      { label: 'rank 0', xs: [1, 2], ys: [0.1 + 0.2, NaN] },
      { label: '=SUM(A1), "x"', xs: [2, 3], ys: [5, 6] }
    ]);
    expect(text.split('\n')).toEqual([
      'step,rank 0,"\'=SUM(A1), ""x"""',
      '1,0.30000000000000004,',
      '2,NaN,5',
      '3,,6',
      ''
    ]);
  });

  it('have names of characters that every file system allows', () => {
    expect(fileName('loss - ../../<b>run</b>', 'csv')).toBe('loss---b-run-b.csv');
    expect(fileName('///', 'png')).toBe('chart.png');
  });
});
