"""Static analysis of the attributes that cells may set on imported modules and classes."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable, Iterator

from accel_nb.pool.sync.imported_attributes import ITSELF, AssignedAttribute

_OWN_MAGIC = "accelerate"
_CHANGING_METHODS = frozenset(
    name
    for kind, unchanging in ((list, tuple), (dict, types.MappingProxyType), (set, frozenset))
    for name in {*dir(kind)} - {*dir(unchanging)}
    if not name.startswith("_")
)


def find_assigned_attributes(tree: ast.AST) -> set[AssignedAttribute]:
    """Return the attributes that code sets, and the objects that it may set attributes of.

    ``config.lr = 0.1`` and ``config.options["lr"] = 0.1`` set a known attribute. ``setattr(Model, name, function)``,
    a decorator such as ``@add_to_class(Model)`` and other calls may set attributes of their arguments, and so may a
    decorator such as fastcore's ``@patch`` of the class in the annotation of its function. Methods that change a list,
    dictionary or set, as in ``config.options.update(lr=0.1)``, set the attribute. Any method of an attribute may change
    the object that it is, as in ``config.counter.add(1)``.
    """
    found: set[AssignedAttribute] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            found |= _find_targets(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            found |= _find_targets([node.target])
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                if _changes_in_place(node.func.attr):
                    found |= _find_targets([node.func.value])
                if isinstance(node.func.value, ast.Attribute) and (owner := _dotted_name(node.func.value)):
                    found.add(AssignedAttribute(owner, ITSELF))
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            found |= {AssignedAttribute(base) for base in map(_dotted_name, arguments) if base}
            for text in _sources_of_magic(node):
                found |= find_assigned_attributes(text)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.decorator_list:
            annotations = [item.annotation for item in (*node.args.posonlyargs, *node.args.args)[:1]]
            found |= {AssignedAttribute(base) for base in map(_dotted_name, annotations) if base}
    return found


def _changes_in_place(method: str) -> bool:
    """Return whether a method changes its object: one of containers, or of tensors, whose names end so."""
    return method in _CHANGING_METHODS or (method.endswith("_") and not method.startswith("_"))


def _find_targets(targets: Iterable[ast.AST]) -> set[AssignedAttribute]:
    found: set[AssignedAttribute] = set()
    for target in targets:
        if isinstance(target, ast.Tuple | ast.List):
            found |= _find_targets(target.elts)
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute) and (base := _dotted_name(target.value)):
            found.add(AssignedAttribute(base, target.attr))
    return found


def _sources_of_magic(call: ast.Call) -> Iterator[ast.Module]:
    """Yield the code of a cell magic such as ``%%time``, which runs in the notebook."""
    texts = [item.value for item in call.args if isinstance(item, ast.Constant)]
    if getattr(call.func, "attr", None) != "run_cell_magic" or len(texts) != 3 or texts[0] == _OWN_MAGIC:
        return
    try:
        yield ast.parse(str(texts[2]))
    except SyntaxError:  # not Python, such as in %%bash
        return


def _dotted_name(node: ast.AST | None) -> str:
    """Return an expression such as ``torch.nn.Linear`` as text; an empty text for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])
