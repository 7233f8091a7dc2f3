"""Attribution of a device's memory: each storage is counted once, by kind and by the variable that references it.

Traverses all objects, which is too slow for every step: use it after an out-of-memory error or on request.
"""

from __future__ import annotations

import gc
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accel_nb.runtime.distributed.sharded import local_shard
from accel_nb.runtime.leaf_tensors import grad_fn_of
from accel_nb.runtime.tensors.nested import find_tensors

_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])")


class MemoryAttribution:
    """Bytes held on one device. A storage is attributed by the first method call that finds it."""

    def __init__(self, device: torch.device | str) -> None:
        self.bytes_by_kind: Counter[str] = Counter()
        """Bytes by kind: parameters, gradients, optimizer, activations, tensors."""
        self.bytes_by_module: Counter[str] = Counter()
        """Bytes of parameters with their gradients and state, by repeated module: ``blocks.*.mlp``."""
        self.activation_bytes_by_module: Counter[str] = Counter()
        """Bytes of activations saved for the backward pass, by the repeated module whose parameters were used last."""
        self.bytes_by_variable: Counter[str] = Counter()
        """Bytes by variable. For a container they include the activations saved in the graphs of its tensors."""
        self._device = torch.device(device)
        self._seen: set[int] = set()
        self._owners: dict[int, str] = {}
        # The module of each visited node. References keep nodes alive: a new node could have the id of a freed one.
        self._nodes: dict[Any, str | None] = {}
        self._direct: set[Any] = set()

    def add_trained(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Count parameters and buffers, gradients and the state of optimizers."""
        states = {key: value for optimizer in optimizers for key, value in optimizer.state.items()}
        for model in models:
            for name, parameter in model.named_parameters():
                module = repeated_module_path(name.rpartition(".")[0]) or type(model).__name__
                self._owners[id(parameter)] = module
                self.bytes_by_module[module] += (
                    self._add([parameter], "parameters")
                    + self._add([] if parameter.grad is None else [parameter.grad], "gradients")
                    + self._add(find_tensors(states.pop(parameter, {})), "optimizer")
                )
            self._add(model.buffers(), "parameters")
        for parameter, state in states.items():
            self._add([parameter] if isinstance(parameter, Tensor) else [], "parameters")
            self._add(find_tensors(state), "optimizer")

    def add_variables(self, names: Mapping[str, Any]) -> None:
        """Count the tensors in variables, each with the activations saved in its autograd graph."""
        for name, value in names.items():
            if isinstance(value, nn.Module | Optimizer | type) or callable(value):
                continue
            is_one = isinstance(value, Tensor)
            for tensor in find_tensors(value):
                node = grad_fn_of(tensor)
                self.bytes_by_variable[name] += self._add([tensor], "tensors" if node is None else "activations")
                if node is not None:
                    size = self._add_graph(node, by_module=is_one)
                    self.bytes_by_variable[name] += 0 if is_one else size

    def add_other_tensors(self) -> None:
        """Count the other tensors that the garbage collector tracks."""
        self._add((item for item in gc.get_objects() if issubclass(type(item), Tensor)), "tensors")

    def _add(self, tensors: Iterable[Tensor], kind: str) -> int:
        total = 0
        for tensor in tensors:
            try:
                storage = local_shard(tensor).untyped_storage()
                where, size, key = storage.device, storage.nbytes(), storage.data_ptr()
            except (RuntimeError, NotImplementedError):  # a tensor without a storage
                continue
            if where == self._device and size and key not in self._seen:
                self._seen.add(key)
                total += size
        self.bytes_by_kind[kind] += total
        return total

    def _add_graph(self, root: Any, *, by_module: bool) -> int:
        """Count the saved tensors of a graph; the module of a node is found after the modules of its children."""
        total, waiting = 0, [(root, False)]
        while waiting:
            node, is_done = waiting.pop()
            if is_done:
                self._nodes[node] = owner = self._owner(node)
                size = self._add(saved_tensors(node), "activations")
                if by_module:
                    self.activation_bytes_by_module[owner or "no module"] += size
                total += size
            elif node not in self._nodes:
                self._nodes[node] = None
                waiting.append((node, True))
                waiting += [(child, False) for child, _ in node.next_functions if child is not None]
        return total

    def _owner(self, node: Any) -> str | None:
        parameter = getattr(node, "variable", None)
        children = [child for child, _ in node.next_functions if child is not None]
        direct = [child for child in children if child in self._direct]
        if parameter is not None or (direct and len(children) == 1):
            self._direct.add(node)
        if parameter is not None:
            return self._owners.get(id(parameter))
        return next((self._nodes[child] for child in [*direct, *children] if self._nodes.get(child)), None)


def saved_tensors(node: Any) -> Iterator[Tensor]:
    """Yield the saved tensors of a node of an autograd graph, without triggering recomputation."""
    for name in dir(node):
        if name.startswith("_raw_saved_"):
            try:
                found = getattr(node, name)
            except RuntimeError:  # a function written in Python, freed by its backward pass
                continue
            for raw in found if isinstance(found, list | tuple) else [found]:
                try:
                    data = getattr(raw, "data", None)
                except RuntimeError:  # freed by its backward pass
                    continue
                if isinstance(data, Tensor):
                    yield data


def repeated_module_path(path: str) -> str:
    """Return a module's path with ``*`` for numbers: one name for all blocks of a list."""
    return _NUMBER.sub("*", path)
