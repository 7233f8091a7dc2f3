"""Static analysis of the attributes that cells may set on imported modules and classes."""

from __future__ import annotations

import ast
import types
from collections.abc import Collection, Iterable, Iterator

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
    the attribute's object, as in ``config.counter.add(1)``.
    """
    return find_in_nodes(ast.walk(tree))


def find_in_nodes(nodes: Iterable[ast.AST], names: Collection[str] = (), owner: str = "") -> set[AssignedAttribute]:
    """Return the attributes that nodes of code set, as `find_assigned_attributes` does.

    The global ``names`` in the code are attributes of ``owner``, the name of its module.
    """
    attributes = _Attributes(names, owner)
    found: set[AssignedAttribute] = set()
    for node in nodes:
        if isinstance(node, ast.Assign):
            found |= attributes.of_targets(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            found |= attributes.of_targets([node.target])
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                if _changes_in_place(node.func.attr):
                    found |= attributes.of_targets([node.func.value])
                if (value := attributes.split(node.func.value)) is not None:
                    found.add(AssignedAttribute(".".join(value), ITSELF))
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            found |= {AssignedAttribute(base) for base in map(attributes.dotted_name, arguments) if base}
            for text in _sources_of_magic(node):
                found |= find_in_nodes(ast.walk(text))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.decorator_list:
            annotations = [item.annotation for item in (*node.args.posonlyargs, *node.args.args)[:1]]
            found |= {AssignedAttribute(base) for base in map(attributes.dotted_name, annotations) if base}
    return found


class _Attributes:
    """The dotted names of the attributes in expressions."""

    def __init__(self, names: Collection[str], owner: str) -> None:
        self._names = names
        self._owner = owner

    def dotted_name(self, node: ast.AST | None) -> str:
        """Return an expression such as ``torch.nn.Linear`` as text; an empty text for any other expression."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        parts.append(node.id)
        if node.id in self._names:
            parts.append(self._owner)
        return ".".join(reversed(parts))

    def split(self, node: ast.AST) -> tuple[str, str] | None:
        """Return the object of which an expression is an attribute, and the attribute's name; None if it is none."""
        base, _, name = self.dotted_name(node).rpartition(".")
        return (base, name) if base else None

    def of_targets(self, targets: Iterable[ast.AST]) -> set[AssignedAttribute]:
        """Return the attributes that are set when something is assigned to ``targets``."""
        found: set[AssignedAttribute] = set()
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                found |= self.of_targets(target.elts)
            while isinstance(target, ast.Subscript):
                target = target.value
            if (attribute := self.split(target)) is not None:
                found.add(AssignedAttribute(*attribute))
        return found


def _changes_in_place(method: str) -> bool:
    """Return whether a method changes its object: one of mutable containers only, or a tensor's such as `add_`."""
    return method in _CHANGING_METHODS or (method.endswith("_") and not method.startswith("_"))


def _sources_of_magic(call: ast.Call) -> Iterator[ast.Module]:
    """Yield the code of a cell magic such as ``%%time``, which runs in the notebook."""
    texts = [item.value for item in call.args if isinstance(item, ast.Constant)]
    if getattr(call.func, "attr", None) != "run_cell_magic" or len(texts) != 3 or texts[0] == _OWN_MAGIC:
        return
    try:
        yield ast.parse(str(texts[2]))
    except SyntaxError:  # not Python, such as in %%bash
        return
