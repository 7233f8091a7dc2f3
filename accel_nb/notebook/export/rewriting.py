"""Rewriting of the source of a plain cell for a script: calls of PyTorch become calls of the accelerator.

Edits replace character ranges of the source, so that the author's names, comments and layout remain.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from accel_nb.notebook.cells.training_analysis import Function, Role, TrainingAnalysis, is_backward

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_CUDA = re.compile(r"cuda(:\d+)?")


@dataclass(slots=True)
class CellRewriter:
    """The edits of one cell's source."""

    text: str
    tree: ast.Module
    training: TrainingAnalysis
    _edits: list[tuple[int, int, str]] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)
    _data: bytes = b""

    def __post_init__(self) -> None:
        self._data = self.text.encode()
        offset = 0
        for line in self._data.split(b"\n"):
            self._starts.append(offset)
            offset += len(line) + 1

    def add_prepare(self, names: Mapping[str, Role]) -> None:
        """Insert a call of ``prepare`` for these names before the cell's first statement that trains."""
        self._insert_prepare(self.tree.body, names)

    def rewrite_functions(self) -> None:
        """Rewrite the functions that train: they prepare the objects that they create, and use the accelerator."""
        for node in self.tree.body:
            if isinstance(node, Function) and node.name in self.training.functions:
                if own := self.training.names_to_prepare(node.name).own:
                    self._insert_prepare(node.body, own)
                self._rewrite_training(node)

    def rewrite_statements(self) -> None:
        """Rewrite the cell's top-level statements to train with the accelerator."""
        for node in self.tree.body:
            if not isinstance(node, Function | ast.ClassDef):
                self._rewrite_training(node)

    def rewrite_calls(self, *, prints: bool) -> None:
        """Rewrite saves, devices and, with ``prints``, prints: print and save on the main process only."""
        for node, parent in _walk(self.tree):
            if (device := _device_text(node, parent)) is not None:
                self._replace(node, device)
            elif isinstance(node, ast.Call):
                self._rewrite_call(node, prints=prints)

    def add_config(self, config: str) -> None:
        """Pass the script's options to an accelerator that the cell constructs itself."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Accelerator":
                arguments = [*node.args, *node.keywords]
                if arguments:  # a comma may follow the last one
                    self._edits.append((end := max(map(self._end, arguments)), end, f", config={config}"))
                else:
                    self._edits.append((end := self._end(node) - 1, end, f"config={config}"))

    def rewritten_source(self) -> str:
        """Return the source with all edits applied; an edit of text that another edit replaces is skipped."""
        applied: list[tuple[int, int, str]] = []
        # At one place insertions come first, then the longest replacement.
        for start, end, text in sorted(self._edits, key=lambda edit: (edit[0], edit[1] > edit[0], -edit[1])):
            if not applied or start >= applied[-1][1]:
                applied.append((start, end, text))
        data = self._data
        for start, end, text in reversed(applied):
            data = data[:start] + text.encode() + data[end:]
        return data.decode()

    def _rewrite_call(self, node: ast.Call, *, prints: bool) -> None:
        if prints and isinstance(node.func, ast.Name) and node.func.id == "print":
            self._replace(node.func, "accelerator.print")
        elif ast.unparse(node.func) == "torch.save":
            self._replace(node.func, "accelerator.save")
        elif isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            options = "".join(f", {self._text_of(word)}" for word in node.keywords if word.arg != "device")
            self._edits.append((self._dot(node.func), self._end(node), f".to(accelerator.device{options})"))

    def _insert_prepare(self, body: list[ast.stmt], names: Mapping[str, Role]) -> None:
        first = next((node for node in body if not isinstance(node, Function) and self.training.trains(node)), None)
        if first is None or not names:
            return
        listed = ", ".join(sorted(names, key=lambda name: names[name]))
        start = self._start(first)
        before = self._data[self._starts[first.lineno - 1] : start].decode()
        separator = "; " if before.strip() else f"\n{before}"
        # The first edit at a place comes first.
        self._edits.insert(0, (start, start, f"{listed} = accelerator.prepare({listed}){separator}"))

    def _rewrite_training(self, scope: ast.AST) -> None:
        for node in ast.walk(scope):
            if not isinstance(node, ast.Call):
                continue
            if is_backward(node) and isinstance(node.func, ast.Attribute):
                if any(word.arg in ("gradient", "inputs") for word in node.keywords) or node.args:
                    continue
                words = "".join(f", {self._text_of(word)}" for word in node.keywords)
                start = self._start(node)
                self._edits.append((start, start, "accelerator.backward("))
                self._edits.append((self._dot(node.func), self._end(node), f"{words})"))
            elif ast.unparse(node.func).rpartition(".")[2] in _CLIPS:
                self._replace(node.func, f"accelerator.{ast.unparse(node.func).rpartition('.')[2]}")

    def _replace(self, node: ast.AST, text: str) -> None:
        assert isinstance(node, ast.expr)
        self._edits.append((self._start(node), self._end(node), text))

    def _dot(self, node: ast.Attribute) -> int:
        """Return the place of the dot before an attribute's name; parentheses may end before it."""
        return self._data.rindex(b".", self._end(node.value), self._end(node))

    def _text_of(self, node: ast.expr | ast.keyword) -> str:
        return self._data[self._start(node) : self._end(node)].decode()

    def _start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset


def _walk(tree: ast.AST, parent: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Yield the nodes of a tree with their parents, without what is inside of f-strings, whose places may be wrong."""
    yield tree, parent
    if not isinstance(tree, ast.JoinedStr):
        for child in ast.iter_child_nodes(tree):
            yield from _walk(child, tree)


def _device_text(node: ast.AST, parent: ast.AST | None) -> str | None:
    """Return the replacement of an expression that names a CUDA device, or chooses one if available; else None."""
    if isinstance(node, ast.IfExp) and "is_available" in ast.unparse(node.test):
        return _device_text(node.body, parent)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device" and len(node.args) == 1:
        return None if _device_text(node.args[0], node) is None else "accelerator.device"
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else None for part in node.values]
        return "str(accelerator.device)" if parts == ["cuda:", None] else None
    if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and _CUDA.fullmatch(node.value)):
        return None
    if isinstance(parent, ast.Compare):
        return None
    takes_device = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) and parent.func.attr == "to"
    if takes_device or (isinstance(parent, ast.keyword) and parent.arg in ("device", "map_location")):
        return "accelerator.device"
    # Other code may take only a string.
    return "str(accelerator.device)" if ":" in node.value else "accelerator.device.type"
