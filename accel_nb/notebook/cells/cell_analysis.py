"""Static analysis of the names that a cell uses and binds, itself and in the functions that it calls.

Runs no user code and imports no torch.
"""

from __future__ import annotations

import ast
import functools
import re
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from accel_nb.notebook.cells.dynamic_names import (
    code_looks_up_names,
    code_names_looked_up,
    looks_up_names,
    names_looked_up,
)
from accel_nb.notebook.cells.reachable_values import notebook_classes, reachable_values
from accel_nb.notebook.cells.user_names import is_reserved
from accel_nb.pool.sync.objects.object_kinds import attributes_of
from accel_nb.pool.sync.reductions.custom_operators import called_operators
from accel_nb.runtime.code_objects import nested_codes
from accel_nb.runtime.python_generators import generator_values

ACCELERATOR_NAMES = frozenset({"accelerator", "Accelerator"})
_DISTRIBUTED_NAMES = frozenset({"init_process_group", "DistributedDataParallel", "DistributedSampler"})
"""A cell that uses one of these, or of `ACCELERATOR_NAMES`, is explicit and runs exactly as written."""

_READING_ATTRIBUTES = frozenset(
    {
        "device", "gather", "gather_for_metrics", "is_last_process", "is_local_main_process", "is_main_process",
        "local_process_index", "log", "num_processes", "print", "process_index", "reduce", "wait_for_everyone",
    }
)  # fmt: skip
"""Attributes of ``accelerator`` that a plain cell may use: objects are still prepared automatically."""

_RANK_VARIABLES = frozenset({"LOCAL_RANK", "RANK"})
_RANK_NAMES = frozenset({"accelerator", "get_rank", "get_node_local_rank", *_RANK_VARIABLES})
"""Names and environment variables by which code finds its rank."""

_DATASET_ATTRIBUTES = ("transform", "target_transform", "transforms", "loader", "dataset")
"""Attributes in which datasets of common libraries store functions, which may be defined in the notebook."""


_NAMES_OF_IPYTHON = re.compile(r"_+|_\d+|_i+|_i\d+|_[dio]h|_exit_code|_accel_nb_.*")
"""Names that IPython binds to inputs, outputs, folders and the status of commands, and those of this package."""


NO_REFERENCES: Mapping[str, Sequence[str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CellNames:
    """The names that a cell uses and binds, and the kind of cell that follows from them."""

    needed: tuple[str, ...]
    """Names that it uses and that the notebook has, without those that the cell always binds before it uses them."""
    optional: frozenset[str]
    """Needed names that it can start without: it reads them on a branch only, or may have bound them before."""
    used: tuple[str, ...]
    """All names that it uses; those that the notebook lacks may exist on the workers."""
    bound: tuple[str, ...]
    """Names that its statements bind, or the functions that it defines or may call."""
    is_explicit: bool
    """Whether it uses an accelerator or PyTorch's distributed classes itself."""
    only_reads_accelerator: bool
    """Whether it only reads from the accelerator: it is plain unless objects were prepared explicitly before it."""
    uses_accelerator: bool
    """Whether it uses the name ``accelerator``."""
    may_depend_on_rank: bool
    """Whether it may depend on the rank, such as by a file name with the rank in it."""
    is_empty: bool


def analyze_cell(
    tree: ast.Module, namespace: Mapping[str, Any], references: Mapping[str, Sequence[str]] = NO_REFERENCES
) -> CellNames:
    """Return the names of a parsed cell, including those used by the functions and classes that it refers to.

    ``references`` has for names whose values are only on the workers the result of `names_in_code` there.
    """
    collector = _NameCollector()
    for statement in tree.body:
        collector.visit(statement)
    resolve = functools.partial(_resolve_names, namespace=namespace, references=references, is_wide=True)
    needed = resolve(collector.loaded)
    if operators := called_operators(namespace, {*collector.attributes, *needed.mentioned}):
        collector.loaded |= dict.fromkeys(operators)
        needed = resolve(collector.loaded)
    if needed.looks_up_names or looks_up_names(tree):
        needed = replace(resolve([*collector.loaded, *_names_of_user(namespace)]), has_more=True)
    surely_needed = needed
    if collector.optional or needed.has_more:
        surely_needed = _resolve_names((name for name in collector.loaded if name not in collector.optional), namespace)
    mentioned = {*collector.loaded, *collector.attributes, *needed.mentioned}
    distributed = _DISTRIBUTED_NAMES & mentioned
    if distributed == {"DistributedSampler"} and "is_initialized" in mentioned:
        distributed = (
            frozenset()
        )  # the code also runs in one process, and in plain cells these functions return what they return there
    return CellNames(
        needed=tuple(name for name in needed.names if name in namespace),
        optional=frozenset(needed.names) - frozenset(surely_needed.names),
        used=tuple(dict.fromkeys([*collector.loaded, *needed.names])),
        bound=tuple(dict.fromkeys([*collector.stored, *needed.stored])),
        is_explicit=bool(distributed or ACCELERATOR_NAMES & mentioned),
        only_reads_accelerator=not distributed
        and "Accelerator" not in mentioned
        and needed.only_reads
        and only_reads_accelerator(tree),
        uses_accelerator="accelerator" in mentioned,
        may_depend_on_rank=bool(_RANK_NAMES & mentioned),
        is_empty=not tree.body,
    )


def only_reads_accelerator(tree: ast.AST) -> bool:
    """Return whether code uses only attributes of ``accelerator`` that prepare nothing, such as `log` and `reduce`."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read_only = {id(node.value) for node in attributes if node.attr in _READING_ATTRIBUTES}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "accelerator"]
    stored = [node for node in attributes if node.attr == "accelerator" and not _is_torch_accelerator(node)]
    return not stored and all(id(node) in read_only for node in names)


def _is_torch_accelerator(node: ast.Attribute) -> bool:
    """Return whether an attribute ``accelerator`` is the module `torch.accelerator`."""
    return node.attr == "accelerator" and isinstance(node.value, ast.Name) and node.value.id == "torch"


class _NameCollector(ast.NodeVisitor):
    """Visits the statements of a cell in execution order and collects the names that it loads and stores."""

    def __init__(self) -> None:
        self.loaded: dict[str, None] = {}
        self.stored: list[str] = []
        self.attributes: set[str] = set()
        self.optional: set[str] = set()
        self._bound_surely: set[str] = set()
        self._bound_maybe: set[str] = set()
        self._branch_depth = 0
        self._comprehension_names: list[set[str]] = []

    def visit_Name(self, node: ast.Name) -> None:
        if any(node.id in names for names in self._comprehension_names):
            return
        if isinstance(node.ctx, ast.Load):
            self._load(node.id)
        else:
            self._store(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not _is_torch_accelerator(node):
            self.attributes.add(node.attr)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in _RANK_VARIABLES:
            self.attributes.add(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._visit_all([node.value, *node.targets])

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self._load(node.target.id)
        self._load_texts(node.target)  # globals()["x"] += 1
        self._visit_all([node.value, node.target])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._load_annotation(node.annotation)
        self._visit_all([node.annotation, *([node.value, node.target] if node.value else [])])

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._visit_all([node.iter, node.target])
        self._visit_loop([*node.body, *node.orelse])

    visit_AsyncFor = visit_For

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._visit_loop([*node.body, *node.orelse])

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._visit_branches(node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._visit_branches([node.body], [node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._visit_branches(node.values[1:], [])

    def visit_Try(self, node: ast.Try) -> None:
        before = set(self._bound_surely)
        self._visit_all([*node.body, *node.orelse])
        ends = [self._bound_surely]
        self._bound_maybe |= self._bound_surely
        for handler in node.handlers:
            self._bound_surely = set(before)
            ends.append(self._visit_branch([handler]))
        self._bound_surely = set(before)
        self._visit_all(node.finalbody)
        self._bound_surely |= set.intersection(*ends)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._visit_all([node.value, node.target])

    def visit_Delete(self, node: ast.Delete) -> None:
        for name in ast.walk(node):
            if isinstance(name, ast.Name):
                self._load(name.id)
                self._bound_surely.discard(name.id)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            self._store(node.name)
        self._visit_all(node.body)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self._visit_branches(*([case] for case in node.cases), [])

    def visit_MatchAs(self, node: ast.MatchAs | ast.MatchStar) -> None:
        self.generic_visit(node)
        if node.name is not None:
            self._store(node.name)

    visit_MatchStar = visit_MatchAs

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        self.generic_visit(node)
        if node.rest is not None:
            self._store(node.rest)

    def visit_Call(self, node: ast.Call) -> None:
        """Visit a call, and the names in its text arguments if it evaluates them or looks them up in `globals`."""
        self.generic_visit(node)
        self._load_texts(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Visit a comparison; ``"name" in globals()`` loads that name."""
        self.generic_visit(node)
        self._load_texts(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Visit a subscript; ``globals()["name"]`` loads that name."""
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Store):
            self._load_texts(node)

    def _load_texts(self, node: ast.AST) -> None:
        for name in names_looked_up(node):
            self._load(name)
            self.attributes.add(name)

    visit_TryStar = visit_Try  # Python 3.11 and newer

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            self._store((alias.asname or alias.name).partition(".")[0])
            self.attributes.add(alias.name)

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all([*node.decorator_list, *node.args.defaults, *(d for d in node.args.kw_defaults if d)])
        self._store(node.name)
        self._visit_body(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_all([*node.args.defaults, *(d for d in node.args.kw_defaults if d)])
        self._visit_body(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)])
        self._store(node.name)
        self._visit_body(node)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        local = {name.id for g in node.generators for name in ast.walk(g.target) if isinstance(name, ast.Name)}
        self.visit(node.generators[0].iter)
        self._comprehension_names.append(local)
        self.generic_visit(node)
        self._comprehension_names.pop()

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def _visit_body(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef) -> None:
        """Visit a body that runs later, when names may have been rebound: all its free names count as loaded."""
        with warnings.catch_warnings():  # the workers report the warnings of the compiler
            warnings.simplefilter("ignore")
            # dont_inherit: this file's __future__ imports must not apply to the cell, which may evaluate annotations.
            code = compile(ast.Module([_as_statement(node)], []), "<cell>", "exec", dont_inherit=True)
        for name in global_names(code):
            self._load(name)
        self.stored += sorted(stored_globals(code))
        self.attributes |= _mentioned_names(code)
        for part in ast.walk(node):
            if not isinstance(getattr(part, "ctx", None), ast.Store):
                self._load_texts(part)
            if isinstance(part, ast.AugAssign):
                self._load_texts(part.target)
            if (annotation := _annotation_of(part)) is not None:
                self._load_annotation(annotation)

    def _load_annotation(self, annotation: ast.AST) -> None:
        """Load the names in an annotation's strings, which `typing.get_type_hints` may look up."""
        texts = [part.value for part in ast.walk(annotation) if isinstance(part, ast.Constant)]
        self._branch_depth += 1
        for name in names_in_texts(text for text in texts if isinstance(text, str)):
            self._load(name)
        self._branch_depth -= 1

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    def _visit_loop(self, nodes: Iterable[ast.AST]) -> None:
        """Visit a loop body: within it, names are bound in order; after it, they may be bound."""
        before = set(self._bound_surely)
        self._visit_all(nodes)
        self._bound_maybe |= self._bound_surely
        self._bound_surely = before

    def _visit_branches(self, *branches: Iterable[ast.AST]) -> None:
        """Visit alternative branches: names that all of them bind are bound after them."""
        before, ends = self._bound_surely, []
        for branch in branches:
            self._bound_surely = set(before)
            ends.append(self._visit_branch(branch))
        self._bound_surely = set.intersection(*ends)

    def _visit_branch(self, nodes: Iterable[ast.AST]) -> set[str]:
        self._branch_depth += 1
        self._visit_all(nodes)
        self._branch_depth -= 1
        self._bound_maybe |= self._bound_surely
        return self._bound_surely

    def _load(self, name: str) -> None:
        if name in self._bound_surely:
            return
        if not (self._branch_depth or name in self._bound_maybe):
            self.optional.discard(name)
        elif name not in self.loaded:
            self.optional.add(name)
        self.loaded.setdefault(name)

    def _store(self, name: str) -> None:
        self.stored.append(name)
        self._bound_surely.add(name)


def _annotation_of(node: ast.AST) -> ast.AST | None:
    found = getattr(node, "returns" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else "annotation", None)
    return found if isinstance(found, ast.AST) else None


def names_in_texts(texts: Iterable[str]) -> Iterable[str]:
    """Yield the names in annotations that are strings; skip strings that are not expressions."""
    for text in texts:
        try:
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, ValueError):
            continue
        yield from (node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


def _as_statement(node: ast.AST) -> ast.stmt:
    return ast.copy_location(ast.Expr(node), node) if isinstance(node, ast.Lambda) else node  # type: ignore[return-value]


def _mentioned_names(code: types.CodeType) -> set[str]:
    """Return the names, attributes and rank variables in a code object and those nested in it.

    `torch.accelerator` is not included.
    """
    names = {
        name
        for part in nested_codes(code)
        for name in part.co_names
        if name != "accelerator" or _accelerator_uses(part)
    }
    return names | {
        text for part in nested_codes(code) for text in _strings_in(part.co_consts) if text in _RANK_VARIABLES
    }


def _strings_in(constants: Iterable[object]) -> Iterable[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _strings_in(constant)


def _accelerator_uses(code: types.CodeType) -> set[str]:
    """Return how a code object, without those nested in it, uses ``accelerator``; `torch.accelerator` is not included.

    A use is the name of the attribute that is read from it, or else of the instruction that follows.
    """
    import dis

    steps = list(dis.get_instructions(code))
    return {
        after.argval if after.opname in ("LOAD_ATTR", "LOAD_METHOD") else after.opname
        for before, step, after in zip([steps[0], *steps], steps, [*steps[1:], steps[-1]], strict=False)
        if step.argval == "accelerator" and (before.argval != "torch" or not step.opname.startswith("LOAD"))
    }


def notebook_code_objects(values: Iterable[Any]) -> Iterable[types.CodeType]:
    """Yield the code objects of the notebook's functions, methods and classes that values refer to."""
    return _find_codes_of_all(values, set())


@functools.lru_cache(maxsize=512)
def global_names(code: types.CodeType) -> frozenset[str]:
    """Return the names that a code object and those nested in it look up as globals."""
    import dis

    return frozenset(
        instruction.argval
        for part in nested_codes(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    )


@functools.lru_cache(maxsize=512)
def stored_globals(code: types.CodeType) -> frozenset[str]:
    """Return the names that a code object and those nested in it bind by a ``global`` statement."""
    import dis

    return frozenset(
        instruction.argval
        for part in nested_codes(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname == "STORE_GLOBAL"
    )


@dataclass(frozen=True, slots=True)
class _ResolvedNames:
    names: list[str]
    stored: list[str]
    mentioned: set[str]
    only_reads: bool
    has_more: bool
    """Whether there are names that only a wide search finds."""
    looks_up_names: bool


def _names_of_user(namespace: Mapping[str, Any]) -> Iterable[str]:
    """Return the names that code may look up by a computed text: not those that IPython binds to inputs and outputs."""
    return [name for name in list(namespace) if not (is_reserved(name) or _NAMES_OF_IPYTHON.fullmatch(name))]


def names_in_code(name: str, namespace: Mapping[str, Any]) -> list[str]:
    """Return the names of a namespace to which the code of a value refers: its functions, hooks and classes.

    Return no names for a value whose own code raises when its attributes are read, as that of an unbound proxy does.
    """
    try:
        found = _resolve_names([name], namespace, is_wide=True).names
    except Exception:  # the user's code may raise anything, and the values of the cell must not be lost
        return []
    return [item for item in found if item != name]


def _resolve_names(
    names: Iterable[str],
    namespace: Mapping[str, Any],
    references: Mapping[str, Sequence[str]] = NO_REFERENCES,
    *,
    is_wide: bool = False,
) -> _ResolvedNames:
    """Return ``names`` and all names that the notebook's functions and classes among them look up, transitively.

    With ``is_wide`` names are included that the code may not need: in annotations that are strings, in functions and
    hooks to which objects refer, and the classes of these objects.
    """
    found: dict[str, None] = {}
    stored: list[str] = []
    mentioned: set[str] = set()
    waiting = list(names)
    seen: set[int] = set()
    reached: set[int] = set()
    only_reads, has_more, looks_up = True, False, False
    followed: set[str] = set()
    while waiting:
        name = waiting.pop(0)
        mentioned.add(name)
        if is_wide and name in references and name not in followed:
            followed.add(name)
            waiting += references[name]
            has_more = True
        if name in found or name not in namespace:
            continue
        found[name] = None
        codes = list(_find_codes(namespace[name], seen))
        if is_wide:
            num_own, further = len(codes), list(names_in_texts(_annotation_texts(namespace[name])))
            for value in reachable_values([namespace[name]], reached):
                codes += _find_codes(value, seen)
                further += [kind.__name__ for kind in notebook_classes(value) if namespace.get(kind.__name__) is kind]
            has_more = has_more or bool(further) or len(codes) > num_own
            waiting += further
        for code in codes:
            looks_up = looks_up or any(map(code_looks_up_names, nested_codes(code)))
            looked_up = {name for part in nested_codes(code) for name in code_names_looked_up(part)}
            waiting += sorted(global_names(code) | looked_up)
            stored += sorted(stored_globals(code))
            mentioned |= _mentioned_names(code)
            if "accelerator" in mentioned:
                parts = [part for part in nested_codes(code) if "accelerator" in part.co_names]
                only_reads = only_reads and all(_accelerator_uses(part) <= _READING_ATTRIBUTES for part in parts)
    return _ResolvedNames(list(found), stored, mentioned, only_reads, has_more, looks_up)


def _annotation_texts(value: Any) -> Iterable[str]:
    """Yield the annotations of a function or class of the notebook that are strings."""
    if isinstance(value, types.FunctionType | type) and value.__module__ == "__main__":
        is_class = isinstance(value, type)
        annotations = vars(value).get("__annotations__", {}) if is_class else value.__annotations__
        yield from (item for item in annotations.values() if isinstance(item, str))
        for item in vars(value).values() if is_class else ():
            yield from _annotation_texts(None if isinstance(item, type) else _function_of(item))


def _find_codes(value: Any, seen: set[int]) -> Iterable[types.CodeType]:
    """Yield the code objects of a value that the notebook defines: of functions, methods, and classes of instances."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        if value.__module__ == "__main__":
            yield value.__code__
        if value.__module__ == "__main__" or "<" in value.__qualname__:
            captured = [_cell_content(cell) for cell in value.__closure__ or ()]
            yield from _find_codes_of_all([*captured, *(value.__defaults__ or ()), *vars(value).values()], seen)
    elif isinstance(value, types.MethodType):
        yield from _find_codes_of_all([value.__func__, value.__self__], seen)
    elif isinstance(value, functools.partial):
        yield from _find_codes_of_all([value.func, *value.args, *value.keywords.values()], seen)
    elif isinstance(value, types.GeneratorType):
        if value.gi_frame is not None and value.gi_frame.f_globals.get("__name__") == "__main__":
            yield value.gi_code
        yield from _find_codes_of_all(generator_values(value).values(), seen)
    elif isinstance(value, type):
        if value.__module__ == "__main__":
            for item in vars(value).values():
                setters = [item.fset, item.fdel] if isinstance(item, property) else []
                yield from _find_codes_of_all([_function_of(item), *setters], seen)
            yield from _find_codes_of_all(value.__mro__[1:], seen)
    elif callable(wrapped := (attributes_of(value) or {}).get("__wrapped__")):  # such as by functools.lru_cache
        yield from _find_codes(wrapped, seen)
    elif isinstance(value, property | staticmethod | classmethod) or type(value).__module__ == "__main__":
        yield from _find_codes(type(value), seen)
        yield from _find_codes_of_all([(attributes_of(value) or {}).get(name) for name in _DATASET_ATTRIBUTES], seen)
    elif callable(collate := (attributes_of(value) or {}).get("collate_fn")):  # a DataLoader or a similar object
        own = vars(value)
        yield from _find_codes_of_all(
            [collate, own.get("worker_init_fn"), own.get("dataset"), own.get("sampler")], seen
        )
    elif not isinstance(value, types.ModuleType):
        own = attributes_of(value) or {}
        yield from _find_codes_of_all([own[name] for name in _DATASET_ATTRIBUTES if name in own], seen)


def _find_codes_of_all(values: Iterable[Any], seen: set[int]) -> Iterable[types.CodeType]:
    for value in values:
        yield from _find_codes(value, seen)


def _function_of(item: Any) -> Any:
    """Return the function of a method or property in a class, or the item itself."""
    if isinstance(item, staticmethod | classmethod | types.MethodType):
        return item.__func__
    if isinstance(item, functools.cached_property):
        return item.func
    return item.fget if isinstance(item, property) else item


def _cell_content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the closure cell is empty
        return None
