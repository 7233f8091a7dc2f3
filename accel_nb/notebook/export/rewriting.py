"""Rewriting of the source of a plain cell for a script: calls of PyTorch become calls of the accelerator.

Edits replace character ranges of the source, so that the author's names, comments and layout remain.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from accel_nb.notebook.cells.training_analysis import Function, Role, TrainingAnalysis, is_backward

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


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

    def rewrite_calls(self) -> None:
        """Rewrite prints, saves and devices: print and save on the main process only, use this rank's device."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                self._replace(node.func, "accelerator.print")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.save":
                self._replace(node.func, "accelerator.save")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
                self._replace(node, f"{self._text_of(node.func.value)}.to(accelerator.device)")
            elif isinstance(node, ast.expr) and _is_device(node):
                self._replace(node, "accelerator.device")

    def add_config(self, config: str) -> None:
        """Pass the script's options to an accelerator that the cell constructs itself."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Accelerator":
                end = self._end(node) - 1
                comma = ", " if node.args or node.keywords else ""
                self._edits.append((end, end, f"{comma}config={config}"))

    def rewritten_source(self) -> str:
        """Return the source with all edits applied; edits inside of another edit are skipped."""
        data, last = self._data, len(self._data) + 1
        outermost: list[tuple[int, int, str]] = []
        for start, end, text in sorted(self._edits, key=lambda edit: (edit[0], -edit[1])):
            if outermost and start < outermost[-1][1]:
                continue
            outermost.append((start, end, text))
        for start, end, text in reversed(outermost):
            assert end <= last
            data, last = data[:start] + text.encode() + data[end:], start
        return data.decode()

    def _insert_prepare(self, body: list[ast.stmt], names: Mapping[str, Role]) -> None:
        first = next((node for node in body if not isinstance(node, Function) and self.training.trains(node)), None)
        if first is None or not names:
            return
        listed = ", ".join(sorted(names, key=lambda name: names[name]))
        start = self._start(first)
        indent = " " * first.col_offset
        self._edits.append((start, start, f"{listed} = accelerator.prepare({listed})\n{indent}"))

    def _rewrite_training(self, scope: ast.AST) -> None:
        for node in ast.walk(scope):
            if not isinstance(node, ast.Call):
                continue
            if is_backward(node) and isinstance(node.func, ast.Attribute):
                if any(word.arg in ("gradient", "inputs") for word in node.keywords) or node.args:
                    continue
                words = "".join(f", {self._text_of(word)}" for word in node.keywords)
                self._replace(node, f"accelerator.backward({self._text_of(node.func.value)}{words})")
            elif ast.unparse(node.func).rpartition(".")[2] in _CLIPS:
                self._replace(node.func, f"accelerator.{ast.unparse(node.func).rpartition('.')[2]}")

    def _replace(self, node: ast.expr, text: str) -> None:
        self._edits.append((self._start(node), self._end(node), text))

    def _text_of(self, node: ast.expr | ast.keyword) -> str:
        return self._data[self._start(node) : self._end(node)].decode()

    def _start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset


def _is_device(node: ast.AST) -> bool:
    """Return whether an expression names a CUDA device, or chooses one if CUDA is available."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and (node.value == "cuda" or node.value.startswith("cuda:"))
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device" and len(node.args) == 1:
        return _is_device(node.args[0])
    return isinstance(node, ast.IfExp) and _is_device(node.body) and "is_available" in ast.unparse(node.test)
