"""Full tensors that were gathered for views, and are kept equal to the sharded tensors.

On one device `row = weight.detach()[0]` and `array = weight.detach().numpy()` share the memory of the weight. For a
sharded weight they share the memory of a full tensor that was gathered for them. While code holds such a view, writes
to it are copied into the shards, and changes of the shards are copied into it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from accel_nb.errors import MisuseError
from accel_nb.runtime.distributed import sharded
from accel_nb.runtime.distributed.communicator import Communicator
from accel_nb.runtime.tensors.own_reads import own_reads
from accel_nb.runtime.torch_private import is_checked

_MAX_UNCHECKED = 64
_UNUSED, _EQUAL, _OUTDATED = range(3)
_SHARED = (
    "the weights of one model were assigned to those of another (`value.data = other.data`) and trained: on one device "
    "both would be the same memory, which divided weights cannot share. Use value.data.copy_(other.data) for a copy, "
    "or train with --strategy ddp, which leaves weights whole"
)
_OWN_REFERENCES = 2
"""The number of references to a copy's storage without any view: from the copy, and from its storage object."""


class GatheredCopy:
    """A sharded tensor and its full tensor; ``whole`` is None once no other tensor or array shares its memory."""

    def __init__(self, target: Any, whole: Tensor, *, by_value: bool) -> None:
        self.target = target
        self.whole: Tensor | None = whole
        # The sharded tensor has received other memory.
        self.is_separate = False
        self._version = whole._version
        # Writes of NumPy, and those by tensors that were assigned to `data`, do not change the version of ``whole``.
        self._values = sharded.own_shard(target, whole).clone() if by_value else None

    def write_back(self) -> None:
        """Copy the full tensor into this rank's shard if code has written into it."""
        if self.whole is None or self.is_separate:
            return
        own = sharded.own_shard(self.target, self.whole)
        if self.whole._version != self._version or (self._values is not None and not _is_equal(own, self._values)):
            sharded.copy_into(self.target, self.whole)
            self._set_equal(self.whole)

    def state(self) -> int:
        """Return whether this rank uses the copy, and if so whether its shard has changed.

        A rank whose shard is empty cannot detect that the sharded tensor has received other memory: the other ranks
        decide.
        """
        shard = sharded.local_shard(self.target)
        if self.whole is None or self.is_separate or not shard.numel():
            return _UNUSED
        return _EQUAL if _is_equal(sharded.own_shard(self.target, self.whole), shard) else _OUTDATED

    def overwrite(self, values: Tensor) -> None:
        """Copy a full tensor into this one, if it is in use."""
        if self.whole is not None and not self.is_separate:
            self.whole.copy_(values)
            self._set_equal(self.whole)

    def _set_equal(self, whole: Tensor) -> None:
        self._version = whole._version
        if self._values is not None:
            self._values = sharded.own_shard(self.target, whole).clone()


class GatheredCopies:
    """The copies of one rank; every rank must add the same ones, in the same order."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        # Copies that are unused on this rank remain, without their memory, until they are unused on all ranks.
        self._copies: list[GatheredCopy] = []
        self._max_unchecked = _MAX_UNCHECKED
        # By address of a shard: sharded tensors that share its memory.
        self._aliases: dict[int, list[weakref.ref[Any]]] = {}
        # The addresses of two parameters' shards of which one was assigned to the other.
        self._pairs: set[tuple[int, int]] = set()
        self._remove_hook: Callable[[], None] | None = None
        self.writes = 0
        """How often code may have written into sharded tensors, the same on all ranks."""

    def may_be_written(self, writes: int) -> bool:
        """Return whether code may have written into sharded tensors since ``writes`` was read; equal on all ranks."""
        return self.writes != writes or bool(self._copies)

    def add(self, target: Any, whole: Tensor, *, by_value: bool) -> None:
        """Keep a full tensor equal to ``target`` while others share its memory.

        With ``by_value`` compare values to find writes.
        """
        self._copies.append(GatheredCopy(target.detach(), whole, by_value=by_value))
        self._observe_modules()
        if len(self._copies) > self._max_unchecked:
            self.refresh()
            self._max_unchecked = max(_MAX_UNCHECKED, 2 * len(self._copies))

    def gather(self, target: Any) -> Tensor:
        """Return the full tensor of ``target`` for assignment to `data`, and keep it equal; every rank must call."""
        self.write_back()
        whole = sharded.gather_full(target, self._comm)
        self.add(target, whole, by_value=True)
        return whole

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy writes to the copies into this rank's shards, and free the copies that are unused."""
        for copy in self._copies:
            copy.write_back()
            if copy.whole is not None and not _is_shared(copy.whole):
                copy.whole = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Gather the copies again whose shards have changed; every rank must call."""
        if not self._copies:
            return
        self.writes += 1
        self.write_back()
        own = [copy.state() for copy in self._copies]
        states = [max(found) for found in zip(*self._comm.all_gather_json(own), strict=True)]
        for copy, state in zip(self._copies, states, strict=True):
            if state == _OUTDATED:
                copy.overwrite(sharded.gather_full(copy.target, self._comm))
        self._copies = [copy for copy, state in zip(self._copies, states, strict=True) if state != _UNUSED]
        if not self._copies:
            self.close()

    def record_alias(self, tensor: Any) -> None:
        """Record for `separate` a sharded tensor that shares memory with another one, as in a state dict."""
        known = self._aliases.setdefault(sharded.local_shard(tensor).data_ptr(), [])
        known[:] = [reference for reference in known if reference() is not None]
        known.append(weakref.ref(tensor))

    def separate(self, tensor: Any, set_data: Callable[[Tensor, Tensor], object]) -> None:
        """Move tensors that share memory with a tensor to copies, by ``set_data``; every rank must call.

        Code that assigns other memory to the tensor expects tensors that it read before to keep the old values.
        """
        self.write_back()
        address = sharded.local_shard(tensor).data_ptr()
        self._pairs = {pair for pair in self._pairs if address not in pair}
        for copy in self._copies if address else ():
            if sharded.local_shard(copy.target).data_ptr() == address:
                copy.is_separate = True
        for reference in self._aliases.pop(address, ()):  # targets of copies are among them
            alias = reference()
            if (
                alias is not None
                and alias is not tensor
                and (shard := sharded.local_shard(alias)).data_ptr() == address
            ):
                set_data(shard, shard.clone())

    def record_pair(self, one: Any, other: Any) -> None:
        """Record that one parameter was assigned the memory of another."""
        self._pairs.add((sharded.local_shard(one).data_ptr(), sharded.local_shard(other).data_ptr()))

    def raise_if_parameters_share_memory(self) -> None:
        """Raise `MisuseError` if two parameters have shared memory since an assignment, as shards cannot."""
        if self._pairs:
            raise MisuseError(_SHARED)

    def join(self, tensor: Any, value: Any, set_data: Callable[[Tensor, Tensor], object]) -> None:
        """Move a sharded tensor, and tensors that share its memory, to the memory of another one, by ``set_data``."""
        own, address = sharded.local_shard(tensor), sharded.local_shard(value).data_ptr()
        if address and address != own.data_ptr():
            aliases = [reference() for reference in self._aliases.pop(address, ())]
            for alias in (value, *aliases):
                if alias is not None and sharded.local_shard(alias).data_ptr() == address:
                    set_data(sharded.local_shard(alias), own)
                    self.record_alias(alias)

    def resume(self, earlier: GatheredCopies | None) -> None:
        """Resume updating the copies of an earlier cell if all ranks have the same ones; every rank must call."""
        copies = [] if earlier is None else earlier._copies
        shapes = [list(copy.target.shape) for copy in copies]
        if all(found == shapes for found in self._comm.all_gather_json(shapes)):
            self._copies += copies
            self._observe_modules()
            self.refresh()

    def used(self) -> Iterator[tuple[Tensor, Any]]:
        """Yield the copies that are in use on this rank, each with its sharded tensor."""
        return ((copy.whole, copy.target) for copy in self._copies if copy.whole is not None and not copy.is_separate)

    def close(self) -> None:
        """Stop updating the copies; writes to them have been copied into this rank's shards."""
        self.write_back()
        if self._remove_hook is not None:
            self._remove_hook()
            self._remove_hook = None

    def _observe_modules(self) -> None:
        if self._copies and self._remove_hook is None:
            self._remove_hook = register_module_forward_pre_hook(lambda *_: self.write_back()).remove


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bytes, so that NaN equals itself."""
    with own_reads():
        return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _is_shared(whole: Tensor) -> bool:
    """Return whether another tensor or array shares a tensor's memory."""
    if not is_checked("gathered_copies"):
        return True
    return torch._C._storage_Use_Count(whole.untyped_storage()._cdata) > _OWN_REFERENCES  # pyright: ignore
