"""Check the words of docstrings, comments, messages and function names; CONTRIBUTING.md has the rules.

``python .ci/words.py [FILE...]``; without files, the package and the sources of the front end. Prints one line for each
finding, and exits with 1 if there is any.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PATTERNS = ("accel_nb/**/*.py", "labextension/src/**/*.ts", "labextension/src/**/*.tsx")

VERBS = ("Ask", "Believe", "Deal", "Give", "Hear", "Know", "Lend", "Let", "Say", "Take", "Tell", "Want")
FIRST_WORD = re.compile(rf"(?:{'|'.join(VERBS)})s?\b|(?:How|What|When|Where|Which|Who|Why)\b|(?:Return|Yield) what\b")
# A module is a noun phrase. Verbs in the third person that are no plural nouns:
ACTIONS = (
    "Adds", "Applies", "Assigns", "Builds", "Collects", "Computes", "Converts", "Creates", "Defines", "Detects",
    "Divides", "Finds", "Gathers", "Implements", "Makes", "Moves", "Opens", "Parses", "Prepares", "Provides", "Reads",
    "Replaces", "Returns", "Rewrites", "Selects", "Sends", "Turns", "Wraps", "Writes",
)  # fmt: skip
MODULE_START = re.compile(rf"(?:{'|'.join(ACTIONS)})\b|[A-Z][a-z]+s(?= (?:the|a|an|each|every|its|these|this)\b)")
PERSON = re.compile(r"\b(?:whoever|nobody|somebody)\b", re.IGNORECASE)
# Words with a standard term, in Python's docstrings, comments and messages.
TERMS = {
    "asked for": "requested",
    "believes": "a verb of what the code does",
    "data set": "dataset",
    "data sets": "datasets",
    "goes on": "continues",
    "hears": "a verb of what the code does",
    "knows": "a verb of what the code does",
    "not served": "not supported",
    "rank's part": "rank's shard",
    "rank's parts": "rank's shards",
    "sign of life": "heartbeat",
    "signs of life": "heartbeats",
    "tells": "a verb of what the code does",
    "texts": "strings",
    "the other side": "the process by its name",
    "way out": "what to do",
    "ways out": "what to do",
    "without a word": "without a message",
}
OTHER_TERM = re.compile(rf"\b(?:{'|'.join(TERMS)})\b", re.IGNORECASE)
NAME = re.compile(r"_*(?:hear|tell|let_go|give_back|take_up)(?:_|$)")

Definition = ast.FunctionDef | ast.AsyncFunctionDef
Documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Finding(NamedTuple):
    """A line of a file, and what is wrong with it."""

    line: int
    problem: str


def check_python(text: str) -> list[Finding]:
    """Return the findings in the text of a Python module, by line."""
    tree = ast.parse(text)
    found = {*_first_words(tree), *_names(tree), *_strings(tree), *_comments(text)}
    return sorted(found)


def check_typescript(text: str) -> list[Finding]:
    """Return the findings in the text of a TypeScript module, by line."""
    lines = enumerate(text.splitlines(), 1)
    return [finding for number, line in lines for finding in _persons(line, number)]


def _first_words(tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if not isinstance(node, Documented):
            continue
        text = ast.get_docstring(node) or ""
        if match := FIRST_WORD.match(text):
            line = 1 if isinstance(node, ast.Module) else node.lineno
            yield Finding(line, f"docstring begins with {match.group()!r}: name the object, or the action as a verb")
        elif isinstance(node, Definition) and text.startswith("Whether ") and not _is_property(node):
            yield Finding(node.lineno, "docstring of a function begins with 'Whether': write 'Return whether'")
        elif isinstance(node, ast.Module) and (match := MODULE_START.match(text)):
            yield Finding(1, f"module docstring begins with {match.group()!r}: use a noun phrase")


def _is_property(node: Definition) -> bool:
    names = (ast.unparse(decorator) for decorator in node.decorator_list)
    return any(name.endswith("property") for name in names)


def _names(tree: ast.AST) -> Iterator[Finding]:
    for node in ast.walk(tree):
        if isinstance(node, Definition) and NAME.match(node.name):
            yield Finding(node.lineno, f"function name {node.name!r}: use a term of the field")


def _strings(tree: ast.AST) -> Iterator[Finding]:
    """Yield findings in docstrings and messages. A string of one word is a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 1:
            for offset, line in enumerate(node.value.splitlines()):
                yield from _persons(line, node.lineno + offset)
                yield from _terms(line, node.lineno + offset)


def _comments(text: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _persons(token.string, token.start[0])
            yield from _terms(token.string, token.start[0])


def _persons(text: str, line: int) -> Iterator[Finding]:
    for match in PERSON.finditer(text):
        yield Finding(line, f"{match.group()!r}: name the process, rank or object")


def _terms(text: str, line: int) -> Iterator[Finding]:
    for match in OTHER_TERM.finditer(text):
        yield Finding(line, f"{match.group()!r}: use {TERMS[match.group().lower()]!r}")


def main(words: Sequence[str]) -> int:
    """Check the named files, or all, and return the exit status."""
    paths = [Path(word).resolve() for word in words] or sorted(path for glob in PATTERNS for path in ROOT.glob(glob))
    is_clean = True
    for path in paths:
        check = check_python if path.suffix == ".py" else check_typescript
        for finding in check(path.read_text(encoding="utf-8")):
            is_clean = False
            print(f"{path.relative_to(ROOT)}:{finding.line}: {finding.problem}")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
