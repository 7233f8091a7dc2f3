import { readdirSync, readFileSync } from 'node:fs';
import { dirname, join, resolve } from 'node:path';
import { describe, expect, it } from 'vitest';

const SOURCES = resolve(__dirname, '../src');

/** The sources that a source imports, types included. */
function importsOf(file: string): string[] {
  const text = readFileSync(file, 'utf-8');
  return [...text.matchAll(/from '(\.[^']*)'/g)]
    .map(([, name]) => resolve(dirname(file), name!))
    .flatMap(path => [`${path}.ts`, `${path}.tsx`, path])
    .filter(path => FILES.has(path));
}

const FILES = new Set(
  readdirSync(SOURCES, { recursive: true, encoding: 'utf-8' })
    .filter(name => /\.tsx?$/.test(name))
    .map(name => join(SOURCES, name))
);

/** The first chain of imports that ends where it began; null if there is none. */
function findCycle(): string[] | null {
  const done = new Set<string>();
  const visit = (file: string, chain: readonly string[]): string[] | null => {
    if (chain.includes(file)) {
      return [...chain.slice(chain.indexOf(file)), file];
    }
    for (const next of done.has(file) ? [] : importsOf(file)) {
      const cycle = visit(next, [...chain, file]);
      if (cycle !== null) {
        return cycle;
      }
    }
    done.add(file);
    return null;
  };
  for (const file of FILES) {
    const cycle = visit(file, []);
    if (cycle !== null) {
      return cycle;
    }
  }
  return null;
}

describe('the sources', () => {
  it('import each other without a cycle', () => {
    expect(FILES.size).toBeGreaterThan(20);
    expect(findCycle()).toBeNull();
  });
});
