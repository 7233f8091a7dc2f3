import { describe, expect, it } from 'vitest';
import { parseMessage, ProtocolError } from '../src/model/protocol';
import { FACTS, stepMessage } from './messages';

function parse(change: Record<string, unknown>) {
  const { content, buffer } = stepMessage(0, [[1, 0.5, 0.1, 5]], change);
  return parseMessage(content, [buffer]);
}

describe('parseMessage', () => {
  it('reads columns from a buffer at any offset', () => {
    const { content, buffer } = stepMessage(0, [
      [1, 0.5, 0.1, 5],
      [2, NaN, 0.1, 6]
    ]);
    const block = parseMessage(content, [buffer]).blocks[0]!;
    expect([...block.values]).toEqual([1, 2, 0.5, NaN, 0.1, 0.1, 5, 6, 0, 0, 0, 0]);
  });

  it('reads numbers that JSON cannot represent', () => {
    expect(parse({ facts: { ...FACTS, loss: 'nan' } }).facts.loss).toBeNaN();
    expect(parse({ facts: { ...FACTS, loss: '-inf' } }).facts.loss).toBe(-Infinity);
    expect(parse({ facts: { ...FACTS, loss: null } }).facts.loss).toBeNull();
  });

  it('cuts long texts', () => {
    expect(parse({ facts: { ...FACTS, title: 'x'.repeat(1_000_000) } }).facts.title).toHaveLength(256);
  });

  it.each([
    ['another version', { version: 2 }],
    ['another kind', { kind: 'html' }],
    ['no blocks', { blocks: null }],
    ['more rows than its buffer has', { blocks: [{ table: 'step', rank: 0, name: '', rows: 100_000_000 }] }],
    ['fewer rows than its buffer has', { blocks: [] }],
    ['a negative number of rows', { blocks: [{ table: 'step', rank: 0, name: '', rows: -1 }] }],
    ['a table of the prototype', { blocks: [{ table: '__proto__', rank: 0, name: '', rows: 1 }] }],
    ['a rank that is no number', { blocks: [{ table: 'step', rank: '0', name: '', rows: 1 }] }],
    ['an enormous rank', { blocks: [{ table: 'step', rank: 1e9, name: '', rows: 1 }] }],
    ['a sequence number that is none', { seq: 1.5 }],
    ['no facts', { facts: null }],
    ['a status of its own', { facts: { ...FACTS, status: '<b>' } }],
    ['a title that is a list', { facts: { ...FACTS, title: ['x'] } }],
    ['a loss that is a text', { facts: { ...FACTS, loss: 'javascript:' } }],
    ['too many notes', { facts: { ...FACTS, notes: new Array<string>(1000).fill('x') } }],
    ['a mark of the prototype', { marks: [{ kind: 'constructor', x: 1, rank: 0, text: '' }] }],
    ['too many marks', { marks: new Array<object>(1000).fill({ kind: 'nan', x: 1, rank: 0, text: '' }) }]
  ])('refuses %s', (_, change) => {
    expect(() => parse(change)).toThrow(ProtocolError);
  });

  it.each([[null], [undefined], ['text'], [[]], [42]])('refuses %j as a message', content => {
    expect(() => parseMessage(content, [])).toThrow(ProtocolError);
  });
});
