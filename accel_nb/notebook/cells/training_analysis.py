"""Static analysis of what cells train: which names refer to models, optimizers, schedulers and loaders.

An optimizer is a name whose ``step`` is called, its model the name whose ``parameters()`` it was constructed with, and
a loader the iterable of a loop with a backward pass. The parameters may be passed by a name that holds them, as a list
or a filter. Parameters of functions are resolved to the arguments of calls.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

Function = ast.FunctionDef | ast.AsyncFunctionDef
_PARAMETER_CONTAINERS = frozenset({"list", "tuple", "dict", "set", "iter", "filter", "sorted", "chain"})
"""Functions whose result holds the parameters that they are given."""
_ITERATOR_WRAPPERS = frozenset({"enumerate", "zip", "iter", "reversed", "tqdm", "trange"})


class Role(IntEnum):
    """The kind of object that a name refers to, in the conventional order of arguments to ``prepare``."""

    MODEL = 0
    OPTIMIZER = 1
    SCHEDULER = 2
    LOADER = 3


@dataclass(slots=True)
class NamesToPrepare:
    """The names that must be prepared for a function to train, by where they are bound."""

    own: dict[str, Role] = field(default_factory=dict)
    """Names that the function binds."""
    params: dict[str, Role] = field(default_factory=dict)
    """Parameters of the function, to be prepared by its callers."""
    outer: dict[str, Role] = field(default_factory=dict)
    """Global names, to be prepared by its callers."""


class TrainingAnalysis:
    """The analysis of all cells of a notebook together."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._models: dict[str, list[str]] = {}
        self._parameter_holders: set[str] = set()
        self._functions: dict[str, Function] = {}
        self.bound: set[str] = set()
        for tree in trees:
            self._functions |= {node.name: node for node in tree.body if isinstance(node, Function)}
            self.bound |= _stored_names(_own_nodes(tree))
            self._record_models(_own_nodes(tree))
        self.functions = self._find_training_functions()
        self._names_to_prepare = {name: NamesToPrepare() for name in self.functions}
        for _ in self.functions:  # a chain of calls has at most this length
            for name in self.functions:
                self._names_to_prepare[name] = self._find_names_to_prepare(self._functions[name])

    def trains(self, node: ast.AST) -> bool:
        """Return whether code has a backward pass other than `accelerator.backward`, or calls a function with one."""
        return any(is_backward(part) or _called_function(part) in self.functions for part in ast.walk(node))

    def roles_in_cell(self, tree: ast.Module) -> dict[str, Role]:
        """Return the notebook's names that a cell trains, with their roles."""
        found = self._find_roles(list(_own_nodes(tree)), frozenset())
        return {name: role for name, role in found.items() if name in self.bound}

    def names_to_prepare(self, name: str) -> NamesToPrepare:
        """Return the names that must be prepared for a training function."""
        return self._names_to_prepare[name]

    def names_only_iterated(self, tree: ast.Module) -> set[str]:
        """Return the names that a cell iterates over without training, itself or in functions that it calls."""
        found: set[str] = set()
        for node in _own_nodes(tree):
            found |= set(self._iterated_names(node, training=False))
            function = self._functions.get(_called_function(node) or "")
            if function is not None and isinstance(node, ast.Call):
                inner = {name for part in ast.walk(function) for name in self._iterated_names(part, training=False)}
                arguments = _arguments(node, function)
                found |= {arguments.get(name, name) for name in inner if name in arguments or name in self.bound}
        return found

    def _find_training_functions(self) -> set[str]:
        found = {name for name, node in self._functions.items() if any(map(is_backward, ast.walk(node)))}
        while True:
            more = {
                name
                for name, node in self._functions.items()
                if name not in found and any(_called_function(part) in found for part in ast.walk(node))
            }
            if not more:
                return found
            found |= more

    def _find_names_to_prepare(self, function: Function) -> NamesToPrepare:
        nodes = list(_own_nodes(function))
        self._record_models(nodes)
        params, stored = frozenset(_parameter_names(function)), _stored_names(nodes)
        needs = NamesToPrepare()
        for name, role in self._find_roles(nodes, params).items():
            place = needs.own if name in stored else needs.params if name in params else needs.outer
            place[name] = role
        if Role.OPTIMIZER in needs.own.values():  # objects that are trained together are prepared in one call
            needs.own |= needs.params
            needs.params = {}
        return needs

    def _find_roles(self, nodes: Sequence[ast.AST], params: frozenset[str]) -> dict[str, Role]:
        found: dict[str, Role] = {}
        stepped = {name for node in nodes if (name := _receiver_of_call(node, "step"))}
        cleared = {name for node in nodes if (name := _receiver_of_call(node, "zero_grad"))}
        for name in stepped:
            is_optimizer = name in cleared or name in self._models
            found[name] = Role.OPTIMIZER if is_optimizer else Role.SCHEDULER
        for node in nodes:
            for name in self._iterated_names(node, training=True):
                found.setdefault(name, Role.LOADER)
            called = _called_function(node)
            if called in self.functions and isinstance(node, ast.Call):
                needs, arguments = (
                    self._names_to_prepare.get(called, NamesToPrepare()),
                    _arguments(node, self._functions[called]),
                )
                for name, role in needs.params.items():
                    if name in arguments:
                        found.setdefault(arguments[name], role)
                for name, role in needs.outer.items():
                    found.setdefault(name, role)
        for name in [name for name, role in found.items() if role is Role.OPTIMIZER]:
            for model in self._models.get(name, []):
                found.setdefault(model, Role.MODEL)
        if Role.MODEL not in found.values() and Role.OPTIMIZER in found.values():
            for name in _possible_models(nodes):
                if name in params:
                    found.setdefault(name, Role.MODEL)
        return found

    def _iterated_names(self, node: ast.AST, *, training: bool) -> Iterator[str]:
        """Yield the names that a loop iterates over, if it trains (``training``) or if it does not (else)."""
        if isinstance(node, ast.For | ast.AsyncFor):
            trains = any(self.trains(part) for part in node.body)
            iters = [node.iter] if trains == training else []
        elif isinstance(node, ast.comprehension):
            iters = [] if training else [node.iter]
        else:
            return
        waiting: list[ast.AST] = list(iters)
        for item in waiting:
            if isinstance(item, ast.Name) and item.id not in vars(builtins):
                yield item.id
            elif isinstance(item, ast.Call) and _last_name(item.func) in _ITERATOR_WRAPPERS:
                waiting += item.args

    def _record_models(self, nodes: Iterable[ast.AST]) -> None:
        """Record which models' parameters each assigned name was constructed from."""
        for node in nodes:
            for name, value in _assigned_values(node):
                if models := list(dict.fromkeys(self._models_in(value))):
                    self._models[name] = models
                    is_constructed = isinstance(value, ast.Call) and _last_name(value.func) not in _PARAMETER_CONTAINERS
                    (self._parameter_holders.discard if is_constructed else self._parameter_holders.add)(name)

    def _models_in(self, value: ast.expr) -> Iterator[str]:
        """Yield the names of models whose parameters an expression reads, itself or by a name that holds them."""
        for part in ast.walk(value):
            if isinstance(part, ast.Name) and part.id in self._parameter_holders:
                yield from self._models[part.id]
            elif (
                isinstance(part, ast.Call)
                and isinstance(part.func, ast.Attribute)
                and part.func.attr in ("parameters", "named_parameters")
                and isinstance(part.func.value, ast.Name)
            ):
                yield part.func.value.id


def is_backward(node: ast.AST) -> bool:
    """Return whether a node calls a method ``backward`` other than `accelerator.backward`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "backward"
        and not (isinstance(node.func.value, ast.Name) and node.func.value.id == "accelerator")
    )


def _own_nodes(scope: ast.Module | Function) -> Iterator[ast.AST]:
    """Yield the nodes of a scope in source order, without those of nested functions and classes."""
    waiting: list[ast.AST] = list(reversed(scope.body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += reversed(list(ast.iter_child_nodes(node)))


def _stored_names(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _assigned_values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield each name that an assignment binds, with its value; tuples of names and of values are paired."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        value = node.value  # pyright: ignore[reportAttributeAccessIssue]
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
            pairs = zip(target.elts, value.elts, strict=False)
        yield from ((name.id, own) for name, own in pairs if isinstance(name, ast.Name) and own is not None)


def _parameter_names(function: Function) -> list[str]:
    arguments = function.args
    return [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _arguments(call: ast.Call, function: Function) -> Mapping[str, str]:
    """Return the name that a call passes for each parameter, for arguments that are plain names."""
    positional = [item.arg for item in (*function.args.posonlyargs, *function.args.args)]
    given = dict(zip(positional, call.args, strict=False))
    given |= {item.arg: item.value for item in call.keywords if item.arg is not None}
    return {name: value.id for name, value in given.items() if isinstance(value, ast.Name)}


def _called_function(node: ast.AST) -> str | None:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _receiver_of_call(node: ast.AST, method: str) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == method:
        return node.func.value.id if isinstance(node.func.value, ast.Name) else None
    return None


def _possible_models(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        name = _called_function(node)
        if name is not None and "loss" not in name.lower() and "criterion" not in name.lower():
            yield name


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
