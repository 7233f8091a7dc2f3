"""Rewriting of the source of a plain cell for a script: calls of PyTorch become calls of the accelerator.

Edits replace character ranges of the source, so that the author's names, comments and layout remain.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from accel_nb.errors import ConfigError
from accel_nb.notebook.cells.training_analysis import Function, Role, TrainingAnalysis, is_backward

_DEVICE = re.compile(r"cuda(:\d+)?")
_COMMENT = re.compile(rb"#.*")
_CLIPS = ("clip_grad_norm_", "clip_grad_value_")


@dataclass(slots=True)
class CellRewriter:
    """The edits of one cell's source."""

    text: str
    tree: ast.Module
    training: TrainingAnalysis
    has_own_print: bool
    """Whether ``print`` is another function in the notebook."""
    # Calls of ``prepare`` are inserted before what other edits change at the same place.
    _prepares: list[tuple[int, int, str]] = field(default_factory=list)
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
        compares = [node for node in _walk(self.tree) if isinstance(node, ast.Compare)]
        # ``device.type == "cuda"`` asks for the kind of the device, which may be another one.
        parts = [part for node in compares for part in (node.left, *node.comparators)]
        parts += [item for part in parts if isinstance(part, ast.Tuple | ast.List | ast.Set) for item in part.elts]
        compared = set(map(id, parts))
        for node in _walk(self.tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                if not self.has_own_print:
                    self._replace(node.func, "accelerator.print")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.save":
                self._replace(node.func, "accelerator.save")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
                self._edits.append((self._dot(node.func), self._end(node), ".to(accelerator.device)"))
            elif isinstance(node, ast.expr) and (device := _device(node)) is not None and id(node) not in compared:
                self._replace(node, device)

    def add_config(self, config: str) -> None:
        """Pass the script's options to an accelerator that the cell constructs itself."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Accelerator":
                end = self._end(node) - 1
                passed = [*node.args, *node.keywords]
                rest = self._data[max(map(self._end, passed)) : end] if passed else b","
                comma = "" if b"," in _COMMENT.sub(b"", rest) else ", "
                self._edits.append((end, end, f"{comma}config={config}"))

    def rewritten_source(self) -> str:
        """Return the source with all edits applied; edits inside of another edit are skipped."""
        edits = [*self._prepares, *self._edits]
        parts: list[bytes] = []
        position = 0
        for start, end, text in sorted(edits, key=lambda edit: (edit[0], edit[1] > edit[0], -edit[1])):
            if start >= position:
                parts += [self._data[position:start], text.encode()]
                position = end
        source = b"".join([*parts, self._data[position:]]).decode()
        assert all(text in source for _, _, text in self._prepares), "a call of prepare is missing"
        return source

    def _insert_prepare(self, body: list[ast.stmt], names: Mapping[str, Role]) -> None:
        if not names:
            return
        listed = ", ".join(sorted(names, key=lambda name: names[name]))
        statements = [node for node in body if not isinstance(node, Function | ast.ClassDef)]
        first = next((node for node in statements if self.training.trains(node)), None)
        if first is None:
            raise ConfigError(
                f"{listed}: cannot detect which statement trains them; call a function with the backward pass "
                "directly, or use accelerator.prepare and accelerator.backward in the cell"
            )
        start = self._start(first)
        before = self._data[self._starts[first.lineno - 1] : start].decode()
        # Another statement may be in the same line.
        separator = "; " if before.strip() else f"\n{before}"
        self._prepares.append((start, start, f"{listed} = accelerator.prepare({listed}){separator}"))

    def _rewrite_training(self, scope: ast.AST) -> None:
        for node in _walk(scope):
            if not isinstance(node, ast.Call):
                continue
            if is_backward(node) and isinstance(node.func, ast.Attribute):
                if any(word.arg in ("gradient", "inputs") for word in node.keywords) or node.args:
                    continue
                start, dot, end = self._start(node), self._dot(node.func), self._end(node)
                self._edits.append((start, start, "accelerator.backward("))
                if node.keywords:
                    self._edits.append((dot, min(map(self._start, node.keywords)), ", "))
                else:
                    self._edits.append((dot, end, ")"))
            elif ast.unparse(node.func).rpartition(".")[2] in _CLIPS:
                self._replace(node.func, f"accelerator.{ast.unparse(node.func).rpartition('.')[2]}")

    def _replace(self, node: ast.expr, text: str) -> None:
        self._edits.append((self._start(node), self._end(node), text))

    def _dot(self, node: ast.Attribute) -> int:
        """Return the position of the dot before an attribute's name, behind the brackets around its object."""
        return self._data.rindex(b".", self._end(node.value), self._end(node))

    def _start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset


def _walk(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes in it, without those of f-strings, whose positions some versions do not give."""
    waiting = [scope]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.JoinedStr)]


def _device(node: ast.AST) -> str | None:
    """Return the source in place of an expression that names a CUDA device, or chooses one if CUDA is available."""
    if isinstance(node, ast.Constant):
        is_name = isinstance(node.value, str) and _DEVICE.fullmatch(node.value) is not None
        return "accelerator.device.type" if is_name else None
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.device" and len(node.args) == 1:
        return None if _device(node.args[0]) is None else "accelerator.device"
    return _device(node.body) if isinstance(node, ast.IfExp) and "is_available" in ast.unparse(node.test) else None
