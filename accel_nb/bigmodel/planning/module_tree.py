"""The tree of a model's modules and tensors: sizes, shared tensors, and modules that are not split."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from accel_nb.bigmodel.planning.sizes import ModelTensor, list_ancestors


class ModuleTree:
    """A model's modules and tensors by name, and the tensors that they share.

    A *part* of a model is a module or a tensor, given by its name.
    """

    def __init__(self, model: nn.Module, tensors: Sequence[ModelTensor], no_split: Iterable[str]) -> None:
        self.tensors = tensors
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._no_split = frozenset(no_split)
        self._indices: dict[str, set[int]] = {name: set() for name in self.modules}
        for index, tensor in enumerate(tensors):
            for name in tensor.names:
                for prefix in list_ancestors(name):
                    self._indices.setdefault(prefix, set()).add(index)

    def tensor_indices(self, name: str) -> set[int]:
        """Return the indices of the tensors in a part, shared ones included."""
        return self._indices[name]

    def nbytes(self, indices: Iterable[int]) -> int:
        """Return the total size of tensors."""
        return sum(self.tensors[index].nbytes for index in indices)

    def is_block(self, name: str) -> bool:
        """Return whether a part is a module of a class that is not to be split."""
        return name in self.modules and type(self.modules[name]).__name__ in self._no_split

    def children(self, name: str) -> list[str]:
        """Return the direct children and tensors of a module; none if it has no children or is not to be split."""
        if name not in self.modules or self.is_block(name):
            return []
        module = self.modules[name]
        children = [child for child, _ in module.named_children()]
        if not children:
            return []
        own = {**module._parameters, **module._buffers}
        direct = [tensor for tensor, value in own.items() if value is not None]
        below = (f"{name}.{part}" if name else part for part in [*direct, *children])
        return [part for part in below if self._indices.get(part)]

    def leaf_parts(self, name: str) -> list[str]:
        """Return the parts of a part that cannot be split further, in the model's order."""
        parts = self.children(name)
        return [leaf for part in parts for leaf in self.leaf_parts(part)] if parts else [name]

    def containing_part(self, tensor: str) -> str:
        """Return the part that a tensor moves with: the outermost block, or module without children, or itself."""
        for name in list_ancestors(tensor):
            if name in self.modules and not self.children(name):
                return name
        return tensor

    def parts_sharing_tensors(self, name: str) -> set[str]:
        """Return the part and all that share tensors with it, directly or transitively: they need the same device."""
        parts_together, waiting = {name}, [name]
        while waiting:
            for index in self._indices[waiting.pop()]:
                for alias in self.tensors[index].names:
                    if any(is_within(alias, member) for member in parts_together):
                        continue
                    holder = self.containing_part(alias)
                    parts_together.add(holder)
                    waiting.append(holder)
        return parts_together


def is_within(name: str, part: str) -> bool:
    """Return whether ``name`` is ``part`` or a descendant of it."""
    return part in ("", name) or name.startswith(part + ".")
