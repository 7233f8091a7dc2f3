"""Names that code looks up by a string: a constant one, as in ``globals()["x"]``, or one computed at run time."""

from __future__ import annotations

import ast
import dis
import re
import types
from collections.abc import Iterable, Iterator, Sequence

_NAMESPACE_FUNCTIONS = frozenset({"globals", "locals", "vars"})
_EVALUATE = frozenset({"eval", "exec"})
_TEXT_CALLS = _EVALUATE | {"run_line_magic", "run_cell_magic", "system", "getoutput", "evaluate", "query"}
"""Calls whose text arguments contain names: functions that evaluate text, compiled magics and ``!commands``."""
_IMPORT_FUNCTIONS = frozenset({"import_module", "__import__"})
_MAIN = "__main__"

_CALLS = frozenset({"CACHE", "PRECALL", "CALL", "CALL_FUNCTION", "PUSH_NULL", "NOP"})
_NAME_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ITEM_USES = frozenset({"BINARY_SUBSCR", "BINARY_OP", "DELETE_SUBSCR", "STORE_SUBSCR", "COPY", "DUP_TOP_TWO"})
"""Instructions after a namespace and a string that read, delete, bind or update the item."""


def looks_up_names(tree: ast.AST) -> bool:
    """Return whether code looks up a name that is not a constant, or evaluates a string that is not a constant."""
    constant_look_ups = {id(namespace) for node in ast.walk(tree) for namespace, _ in _scope_texts(node)}
    return any(
        _names_main_module(node)
        or (_is_namespace(node) and id(node) not in constant_look_ups)
        or _evaluates_computed_text(node)
        for node in ast.walk(tree)
    )


def names_looked_up(node: ast.AST) -> Iterator[str]:
    """Yield the names in the constant strings by which an expression, without the parts of it, looks up names."""
    texts = [text for _, text in _scope_texts(node)]
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
        if called in _TEXT_CALLS:
            texts += [item.value for item in node.args if isinstance(item, ast.Constant)]
    yield from _names_in(texts)


def code_looks_up_names(code: types.CodeType) -> bool:
    """Return whether a function's own code looks up names as `looks_up_names` does."""
    instructions = _own_instructions(code)
    for index, instruction in enumerate(instructions):
        if instruction.opname not in _NAME_LOADS:
            continue
        if instruction.argval == "globals" and _scope_text(instructions, index) is None:
            return True
        if instruction.argval in _EVALUATE and not _loads_text(instructions[index + 1]):
            return True
    names, mentions_main = set(code.co_names), _MAIN in code.co_consts
    return (
        bool(names & {"user_ns", _MAIN})
        or ("modules" in names and ("__name__" in names or mentions_main))
        or (mentions_main and bool(names & _IMPORT_FUNCTIONS))
    )


def code_names_looked_up(code: types.CodeType) -> Iterator[str]:
    """Yield the names in the constant strings by which a function's own code looks up names."""
    instructions = _own_instructions(code)
    texts: list[object] = []
    for index, instruction in enumerate(instructions):
        if instruction.opname in _NAME_LOADS and instruction.argval == "globals":
            texts.append(_scope_text(instructions, index))
        elif instruction.opname.startswith("LOAD") and instruction.argval in _TEXT_CALLS:
            texts += _texts_from(instructions, index + 1)
    yield from _names_in(texts)


def _scope_texts(node: ast.AST) -> Iterator[tuple[ast.AST, object]]:
    """Yield the call, as of `globals`, whose result an expression looks a constant string up in, and the string."""
    namespace, key = None, None
    if isinstance(node, ast.Subscript):
        namespace, key = node.value, node.slice
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.In | ast.NotIn):
        namespace, key = node.comparators[0], node.left
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:  # globals().get("x")
        namespace, key = node.func.value, node.args[0]
    if namespace is not None and _is_namespace(namespace) and isinstance(key, ast.Constant) and _is_text(key):
        yield namespace, key.value


def _is_namespace(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) in _NAMESPACE_FUNCTIONS and not node.args


def _evaluates_computed_text(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or getattr(node.func, "id", None) not in _EVALUATE:
        return False
    return bool(node.args) and not _is_text(node.args[0])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _names_main_module(node: ast.AST) -> bool:
    """Return whether an expression or import is the notebook's module or namespace, as ``get_ipython().user_ns``."""
    if isinstance(node, ast.Subscript) and getattr(node.value, "attr", None) == "modules":
        return getattr(node.slice, "id", None) == "__name__" or getattr(node.slice, "value", None) == _MAIN
    if isinstance(node, ast.Call) and node.args:
        called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        return called in _IMPORT_FUNCTIONS and getattr(node.args[0], "value", None) == _MAIN
    if isinstance(node, ast.ImportFrom):
        return node.module == _MAIN
    if isinstance(node, ast.Import):
        return any(alias.name == _MAIN for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr == "user_ns"


def _own_instructions(code: types.CodeType) -> list[dis.Instruction]:
    """Return the instructions of code without those of calls; none if it uses no function that looks up names."""
    if _TEXT_CALLS.isdisjoint(code.co_names) and "globals" not in code.co_names:
        return []
    return [instruction for instruction in dis.get_instructions(code) if instruction.opname not in _CALLS]


def _scope_text(instructions: Sequence[dis.Instruction], index: int) -> object:
    """Return the constant string that is looked up in the namespace loaded at ``index``, or None."""
    after = [*instructions[index + 1 : index + 4]]
    if after[0].opname == "CONTAINS_OP":
        return instructions[index - 1].argval if index > 0 and _loads_text(instructions[index - 1]) else None
    if len(after) > 1 and _loads_text(after[0]) and after[1].opname in _ITEM_USES:
        return after[0].argval
    is_method = len(after) > 1 and after[0].opname in ("LOAD_ATTR", "LOAD_METHOD") and _loads_text(after[1])
    return after[1].argval if is_method else None


def _texts_from(instructions: Sequence[dis.Instruction], index: int) -> Iterator[object]:
    """Yield the constant strings that the instructions from ``index`` on load, up to the first other one."""
    while index < len(instructions) and _loads_text(instructions[index]):
        yield instructions[index].argval
        index += 1


def _loads_text(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("LOAD_CONST") and isinstance(instruction.argval, str)


def _names_in(texts: Iterable[object]) -> Iterator[str]:
    for text in texts:
        if isinstance(text, str):
            yield from re.findall(r"[^\W\d]\w*", text)
