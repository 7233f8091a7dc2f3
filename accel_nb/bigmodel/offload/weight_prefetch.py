"""Prefetch of offloaded weights into a bounded set of buffers, in the order that earlier forwards used them.

A `WeightGroup` has the weights that a forward needs at once: the weights of a block, or the direct weights of a module.
Groups are read in the order of their next use, unless the transfer does not benefit from prefetch. The group whose next
use is last is evicted first, so that buffers that the prefetch does not need retain some groups until the next forward.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accel_nb.bigmodel.host_memory import align_up
from accel_nb.bigmodel.offload.mmap_weights import PageLease
from accel_nb.bigmodel.offload.weight_transfer import HostTensor, WeightSource, WeightTransfer, lease_weights
from accel_nb.errors import AccelNbError, MisuseError
from accel_nb.runtime.devices.registry import device_type
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors

_IDLE_S = 0.25
"""A reader thread ends after this time without work; the next forward starts another."""
_MIN_PREFETCH_BYTES = 32 << 20
"""Consecutive groups up to this size in total are prefetched together."""


class OffloadError(AccelNbError, OSError):
    """Offloaded weights cannot be read or written."""


@dataclass(eq=False)
class OffloadedWeight:
    """One tensor of a group: its source, and the entries of modules that hold it."""

    name: str
    source: WeightSource
    placeholder: Tensor
    """The placeholder in the modules while the weight is offloaded, on the meta device."""
    holders: list[tuple[dict[str, Any], str]]
    aliases: tuple[str, ...] = ()
    """All names of the tensor in the model."""
    was_trainable: bool = False
    offset: int = 0
    """Its offset in the group's buffer, in bytes."""

    @property
    def nbytes(self) -> int:
        """Its size in the buffer."""
        return self.placeholder.numel() * self.placeholder.dtype.itemsize


class WeightGroup:
    """The tensors that a module's forward needs at once."""

    def __init__(
        self,
        name: str,
        weights: Sequence[OffloadedWeight],
        *,
        reads_few_rows: bool = False,
        contains_others: bool = False,
    ) -> None:
        self.name = name
        self.weights = tuple(weights)
        self.reads_few_rows = reads_few_rows
        """Whether a forward only looks up few rows of its tensors."""
        self.contains_groups = contains_others
        """Whether other groups are acquired and released during its forward."""
        self.nbytes = 0
        for weight in self.weights:
            weight.offset = self.nbytes
            self.nbytes += align_up(weight.nbytes)

    def __repr__(self) -> str:
        return f"WeightGroup({self.name!r}, {self.nbytes} bytes)"


@dataclass(eq=False)
class _Buffer:
    nbytes: int
    memory: Tensor | None
    """None if the group is used in place; its lease is released after each use."""
    lease: PageLease | None = None
    events: list[Any] = field(default_factory=list)
    """Events of computations that may still read it."""
    views: dict[WeightGroup, list[Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class _Residency:
    """A group that is in a buffer, or is read into it."""

    buffer: _Buffer
    state: Literal["filling", "ready", "stale", "failed"] = "filling"
    """``stale``: the buffer no longer holds the current weights."""
    users: int = 0
    handle: Any = None
    error: BaseException | None = None
    versions: list[int] = field(default_factory=list)
    """Version counters of its tensors when they were installed in the modules."""
    is_installed: bool = False
    installed_entries: set[tuple[int, str]] = field(default_factory=set[tuple[int, str]])
    """The entries of modules, by the id of the dict and the key, that have its tensors."""


class _ThreadState(threading.local):
    """The groups that one computing thread has used and uses now, and its position in the order."""

    def __init__(self) -> None:
        self.seen: list[WeightGroup] = []
        self.held: list[WeightGroup] = []
        self.next = 0
        self.depth = 0


class WeightPrefetcher:
    """Loads the weights of groups for the forwards that need them; several threads may compute at once.

    ``budget`` limits the buffers, in bytes. It is exceeded only while the groups in use need more, as several
    concurrent forwards may.
    """

    def __init__(
        self, groups: Sequence[WeightGroup], transfer: WeightTransfer, budget: int, *, num_readers: int = 1
    ) -> None:
        self._transfer = transfer
        self._device_type = device_type(transfer.device)
        self._budget = budget
        self._num_readers = num_readers
        self._changed = threading.Condition()
        self._residencies: dict[WeightGroup, _Residency] = {}
        self._idle: list[_Buffer] = []
        self._allocated = 0
        self._order: list[WeightGroup] = []
        self._positions: dict[WeightGroup, list[int]] = {}
        self._now = 0
        self._upcoming: dict[int, list[WeightGroup]] = {}
        self._readers: list[threading.Thread] = []
        self._is_stopped = threading.Event()
        # A thread inside torch when the interpreter exits crashes the process.
        self.stop_readers = weakref.finalize(self, _stop_readers, self._is_stopped, self._changed, self._readers)
        """Stops the readers and waits for them; runs at the exit of the interpreter too."""
        self._thread_state = _ThreadState()
        self.num_fills = 0
        """How many times a group was read."""
        self.peak_bytes = 0
        """The largest total size of the buffers so far."""
        self._sharing = _sharing_groups(groups)
        self._set_order(groups)

    @property
    def device(self) -> torch.device:
        """The device that the weights are loaded to."""
        return self._transfer.device

    def begin_forward(self) -> None:
        """Start a forward of the whole model; the order of this thread's previous forward is expected again."""
        state = self._thread_state
        state.depth += 1
        if state.depth == 1:
            if state.seen:
                with self._changed:
                    self._set_order(state.seen)
            state.seen, state.next = [], 0

    def end_forward(self, *, completed: bool) -> None:
        """End a forward of the whole model; the order of one that did not complete is discarded."""
        self._thread_state.depth -= 1
        if not self._thread_state.depth:
            if not completed:
                self._thread_state.seen = []
            alive = {thread.ident for thread in threading.enumerate()}
            with self._changed:
                self._upcoming = {ident: upcoming for ident, upcoming in self._upcoming.items() if ident in alive}

    def acquire(self, group: WeightGroup) -> None:
        """Install the group's weights in its modules, reading them first if needed; raises `OffloadError`."""
        residency: _Residency | None = None
        reads = is_counted = False
        try:
            with self._changed:
                self._advance(group)
                residency = self._residencies.get(group)
                reads = residency is None
                if residency is None:
                    buffer = self._buffer_for(group, needed=True)
                    assert buffer is not None, "a group in use always gets a buffer"
                    residency = self._residencies[group] = _Residency(buffer)
                residency.users += 1
                is_counted = True
            if reads:
                self._fill(group, residency)
            with self._changed:
                while residency.state == "filling":
                    self._changed.wait()
                if residency.state == "failed":
                    raise OffloadError(
                        f"the weights of {group.name} cannot be read: {residency.error}"
                    ) from residency.error
                if not residency.is_installed:
                    if residency.buffer.lease is not None:
                        residency.buffer.lease.acquire()
                    self._install(group, residency)
            self._transfer.wait(residency.handle)
        except BaseException as error:  # an interrupt may come at any time
            if residency is not None:
                with self._changed:
                    residency.users -= is_counted
                    if reads and residency.state == "filling":
                        residency.state, residency.error = "failed", error
                    self._drop_if_unused(group, residency)
            if isinstance(error, OSError) and not isinstance(error, OffloadError):
                raise OffloadError(f"the weights of {group.name} cannot be read: {error}") from error
            raise
        self._thread_state.held.append(group)

    def has_acquired_any(self, groups: Sequence[WeightGroup]) -> bool:
        """Return whether the calling thread has acquired one of the groups and not released it."""
        held = self._thread_state.held
        return any(group in held for group in groups)

    def release(self, group: WeightGroup) -> None:
        """Replace the weights by placeholders; weights that were changed in place are retained in memory."""
        self._thread_state.held.remove(group)
        with self._changed:
            residency = self._residencies[group]
            if (
                residency.buffer.memory is not None
                and (event := self._transfer.record_use(residency.buffer.memory)) is not None
            ):
                residency.buffer.events.append(event)
            residency.users -= 1
            self._drop_if_unused(group, residency)
            if self._upcoming.get(threading.get_ident()):  # groups that were not retained have freed their space
                self._request_upcoming(self._budget)

    def saved_tensors_hooks(self, group: WeightGroup) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return hooks for saved tensors, for the forward of a group that this thread has acquired.

        With them autograd saves references in place of the tensors of this and of other acquired groups; the backward
        pass reads these tensors again.
        """
        spans = [span for held in {*self._thread_state.held, group} for span in self._spans(held)]

        def pack(tensor: Tensor) -> Any:
            span = self._find_span(tensor, spans)
            if span is None:
                return tensor
            if tensor.is_conj() or tensor.is_neg():  # views by a flag, which a reference does not have
                return tensor.clone()
            offset = tensor.data_ptr() - span.begin
            return _SavedReference(span.group, span.index, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

        return pack, self._fetch

    def copy_views(self, group: WeightGroup, output: Any) -> Any:
        """Return a forward's output, with copies in place of views of the group's tensors, which are freed after it."""
        spans = self._spans(group)
        if all(self._find_span(tensor, spans) is None for tensor in find_tensors(output)):
            return output
        return map_tensors(lambda tensor: tensor if self._find_span(tensor, spans) is None else tensor.clone(), output)

    def close(self) -> None:
        """Free all buffers; no forward may be running."""
        with self._changed:
            self._upcoming.clear()
            self._residencies.clear()
            self._idle.clear()
            self._allocated = 0
            self._changed.notify_all()

    def _spans(self, group: WeightGroup) -> list[_Span]:
        """Return the addresses of an acquired group's tensors."""
        views = self._residencies[group].buffer.views[group]
        return [_Span(view.data_ptr(), view.data_ptr() + view.nbytes, group, index) for index, view in enumerate(views)]

    def _find_span(self, tensor: Tensor, spans: Sequence[_Span]) -> _Span | None:
        """Return the span that holds a tensor's first byte; None if there is none."""
        # Devices themselves are not equal: tensors on "cuda" have the device "cuda:0".
        if device_type(tensor.device) is not self._device_type or tensor.layout is not torch.strided:
            return None
        start = tensor.data_ptr()
        return next((span for span in spans if span.begin <= start < span.end), None)

    def _fetch(self, reference: Any) -> Tensor:
        if not isinstance(reference, _SavedReference):
            return reference
        self.acquire(reference.group)
        try:
            view = self._residencies[reference.group].buffer.views[reference.group][reference.index].detach()
            flat = view.reshape(-1).view(torch.uint8)[reference.offset :]
            flat = flat[: flat.numel() // reference.dtype.itemsize * reference.dtype.itemsize].view(reference.dtype)
            return flat.as_strided(reference.shape, reference.stride, flat.storage_offset()).clone()
        finally:
            self.release(reference.group)

    # --- methods below require the lock, except `_fill`, `_lease`, `_copy` and `_read_ahead` ---

    def _set_order(self, order: Sequence[WeightGroup]) -> None:
        if list(order) != self._order:
            self._order = list(order)
            self._positions = {}
            for position, group in enumerate(order):
                self._positions.setdefault(group, []).append(position)

    def _advance(self, group: WeightGroup) -> None:
        """Record this thread's position in the order, and request the groups that it needs next."""
        state, order = self._thread_state, self._order
        if len(state.seen) > 8 * len(order):  # parts of the model are called alone, without `end_forward`
            state.seen = []
        state.seen.append(group)
        if state.next >= len(order) or order[state.next] is not group:
            places = self._positions.get(group)
            if not places:
                return
            at = bisect_left(places, state.next)
            state.next = places[at] if at < len(places) else places[0]
        self._now = state.next
        state.next = (state.next + 1) % len(order)
        self._request_upcoming(self._budget - group.nbytes)

    def _request_upcoming(self, remaining_bytes: int) -> None:
        """Request the groups that this thread needs next, within ``remaining_bytes``."""
        order, begin = self._order, self._thread_state.next
        upcoming: list[WeightGroup] = []
        ahead = 0
        for step in range(len(order) - 1):
            other = order[(begin + step) % len(order)]
            remaining_bytes -= other.nbytes
            if remaining_bytes < 0 or (
                step > self._num_readers and ahead >= min(_MIN_PREFETCH_BYTES, self._budget // 2)
            ):
                break
            ahead += other.nbytes
            if other in self._residencies or self._transfer.benefits_from_prefetch(
                [weight.source for weight in other.weights]
            ):
                upcoming.append(other)
        self._upcoming[threading.get_ident()] = upcoming
        if any(other not in self._residencies for other in upcoming):
            self._ensure_readers()

    def _ensure_readers(self) -> None:
        self._readers[:] = [reader for reader in self._readers if reader.is_alive()]
        while not self._is_stopped.is_set() and len(self._readers) < self._num_readers:
            reader = threading.Thread(target=self._read_ahead, name="accel_nb-read-ahead", daemon=True)
            self._readers.append(reader)
            reader.start()
        self._changed.notify_all()

    def _read_ahead(self) -> None:
        """Read requested groups into buffers; end after `_IDLE_S` without a request."""
        while not self._is_stopped.is_set():
            with self._changed:
                found = self._next_request()
                if found is None and not self._changed.wait(_IDLE_S):
                    found = self._next_request()
                    if found is None:
                        self._readers.remove(threading.current_thread())
                        return
                if found is None:
                    continue
            self._fill(*found)

    def _next_request(self) -> tuple[WeightGroup, _Residency] | None:
        for upcoming in self._upcoming.values():
            for group in upcoming:
                if group in self._residencies:
                    continue
                buffer = self._buffer_for(group, needed=False)
                if buffer is None:
                    break
                residency = self._residencies[group] = _Residency(buffer)
                return group, residency
        return None

    def _fill(self, group: WeightGroup, residency: _Residency) -> None:
        """Read a group into its buffer."""
        try:
            handle = (
                self._lease(group, residency.buffer)
                if residency.buffer.memory is None
                else self._copy(group, residency.buffer)
            )
        except BaseException as error:
            with self._changed:
                residency.state, residency.error = "failed", error
                self._upcoming = {
                    ident: [other for other in upcoming if other is not group]
                    for ident, upcoming in self._upcoming.items()
                }
                self._drop_if_unused(group, residency)
            if not isinstance(error, Exception):
                raise
            return
        with self._changed:
            residency.handle, residency.state = handle, "ready"
            self.num_fills += residency.buffer.memory is not None
            self._changed.notify_all()

    def _lease(self, group: WeightGroup, buffer: _Buffer) -> None:
        """Lease the group's tensors in place."""
        page_lease = lease_weights([weight.source for weight in group.weights], reads_few_rows=group.reads_few_rows)
        with torch.inference_mode(False):  # the tensors outlive the caller's inference mode
            views = [_view(weight, tensor) for weight, tensor in zip(group.weights, page_lease.tensors, strict=True)]
        buffer.lease, buffer.views = page_lease, {group: views}

    def _copy(self, group: WeightGroup, buffer: _Buffer) -> Any:
        """Fill the memory of a buffer and return the transfer's handle."""
        events, buffer.events = buffer.events, []
        if group not in buffer.views:
            assert buffer.memory is not None
            with torch.inference_mode(False):
                buffer.views = {**buffer.views, group: _views(group, buffer.memory)}
        jobs = [(weight.source, view.detach()) for weight, view in zip(group.weights, buffer.views[group], strict=True)]
        return self._transfer.fill(jobs, events)

    def _can_lease(self, group: WeightGroup) -> bool:
        """Return whether the group can be used in place; its files cannot be written to meanwhile."""
        if group.contains_groups:
            return False
        return all(
            weight.source.dtype == weight.placeholder.dtype for weight in group.weights
        ) and self._transfer.can_lease([weight.source for weight in group.weights], reads_few_rows=group.reads_few_rows)

    def _drop_if_unused(self, group: WeightGroup, residency: _Residency) -> None:
        """Remove an unused group from the modules; it is retained in its buffer if that is valid and in budget."""
        if not residency.users and self._residencies.get(group) is residency:
            try:
                if residency.is_installed:
                    self._uninstall(group, residency)
            finally:
                if residency.buffer.lease is not None:
                    residency.buffer.lease.release()
            is_over_budget = self._allocated > self._budget and residency.state != "filling"
            if is_over_budget or (residency.buffer.memory is None and residency.state != "filling"):
                self._allocated -= self._residencies.pop(group).buffer.nbytes
            elif residency.state in ("failed", "stale"):  # the next forward reads it again
                self._idle.append(self._residencies.pop(group).buffer)
        self._changed.notify_all()

    def _buffer_for(self, group: WeightGroup, *, needed: bool) -> _Buffer | None:
        """Return a buffer for the group, evicting groups that are needed later; None if there is no space yet."""
        in_place = self._can_lease(group)
        best = self._idle_for(group, in_place)
        if best is None and self._allocated + group.nbytes > self._budget:
            self._make_room(group, in_place, needed=needed)
            best = self._idle_for(group, in_place)
        if best is not None:
            self._idle.remove(best)
            return best
        if self._allocated + group.nbytes > self._budget and not needed:
            return None
        memory: Tensor | None = None
        if not in_place:
            with torch.inference_mode(False):
                memory = self._transfer.allocate(group.nbytes)
        self._allocated += group.nbytes
        self.peak_bytes = max(self.peak_bytes, self._allocated)
        if memory is None:
            return _Buffer(group.nbytes, None)
        # The allocator may return memory that earlier computations still read.
        event = self._transfer.record_use(memory)
        return _Buffer(group.nbytes, memory, events=[] if event is None else [event])

    def _idle_for(self, group: WeightGroup, in_place: bool) -> _Buffer | None:
        """Return the smallest unused buffer that is large enough, if any; None if the group is used in place."""
        fitting = [] if in_place else [buffer for buffer in self._idle if buffer.nbytes >= group.nbytes]
        return min(fitting, key=lambda buffer: buffer.nbytes, default=None)

    def _make_room(self, group: WeightGroup, in_place: bool, *, needed: bool) -> None:
        """Evict groups that are needed later than this one, the last first, until a buffer fits or can be allocated."""
        upcoming = {other for groups in self._upcoming.values() for other in groups}
        limit = -1 if needed else self._distance(group)
        evictable = [
            other
            for other, residency in self._residencies.items()
            if not residency.users and residency.state == "ready" and (needed or other not in upcoming)
            and self._distance(other) > limit
        ]  # fmt: skip
        for other in [*sorted(evictable, key=self._distance, reverse=True), None]:
            while self._idle and self._allocated + group.nbytes > self._budget:
                self._allocated -= self._idle.pop().nbytes
            if other is None or self._allocated + group.nbytes <= self._budget:
                return
            buffer = self._residencies.pop(other).buffer
            if buffer.memory is None:
                self._allocated -= buffer.nbytes
            else:
                self._idle.append(buffer)
                if self._idle_for(group, in_place) is not None:
                    return

    def _distance(self, group: WeightGroup) -> int:
        """Return how many groups later this one is needed, in the expected order."""
        places = self._positions.get(group)
        if not places:
            return len(self._order) + 1
        at = bisect_left(places, self._now + 1)
        return (places[at] if at < len(places) else places[0] + len(self._order)) - self._now

    def _install(self, group: WeightGroup, residency: _Residency) -> None:
        residency.versions = [view._version for view in residency.buffer.views[group]]
        residency.is_installed = True
        self._place(group, residency)

    def _place(self, group: WeightGroup, residency: _Residency) -> None:
        """Put the tensors into the modules, except where another group in use has put its own."""
        for weight, view in zip(group.weights, residency.buffer.views[group], strict=True):
            for holder, key in weight.holders:
                if holder[key] is weight.placeholder:
                    holder[key] = view
                    residency.installed_entries.add((id(holder), key))

    def _uninstall(self, group: WeightGroup, residency: _Residency) -> None:
        residency.is_installed = False
        installed_entries, residency.installed_entries = residency.installed_entries, set()
        for weight, view, version in zip(group.weights, residency.buffer.views[group], residency.versions, strict=True):
            now = view
            for holder, key in weight.holders:
                if (id(holder), key) in installed_entries:
                    now = holder[key] if holder[key] is not view else now
                    holder[key] = weight.placeholder
            if now is not view or view._version != version:
                if now.shape != view.shape or now.dtype != view.dtype:
                    raise MisuseError(
                        f"a forward has replaced the offloaded {weight.name} by a tensor of shape "
                        f"{tuple(now.shape)} and {now.dtype}; keep buffers in memory (offload_buffers=False)"
                    )
                weight.source = HostTensor(now.detach().to("cpu", copy=True))
                if now is not view:
                    residency.state = "stale"
        for other in self._sharing.get(group, ()):
            if (found := self._residencies.get(other)) is not None and found.is_installed:
                self._place(other, found)


def _sharing_groups(groups: Sequence[WeightGroup]) -> dict[WeightGroup, list[WeightGroup]]:
    """Return for each group the other groups with weights of the same modules, such as a layer in several blocks."""
    users: dict[tuple[int, str], list[WeightGroup]] = {}
    for group in groups:
        for weight in group.weights:
            for holder, key in weight.holders:
                users.setdefault((id(holder), key), []).append(group)
    found: dict[WeightGroup, dict[WeightGroup, None]] = {}
    for sharing in users.values():
        for group in sharing if len(sharing) > 1 else ():
            found.setdefault(group, {}).update(dict.fromkeys(other for other in sharing if other is not group))
    return {group: list(others) for group, others in found.items()}


def _stop_readers(is_stopped: threading.Event, changed: threading.Condition, readers: list[threading.Thread]) -> None:
    """Stop the readers and wait until they have ended their current reads."""
    is_stopped.set()
    with changed:
        changed.notify_all()
        alive = [reader for reader in readers if reader is not threading.current_thread()]
    for reader in alive:
        reader.join()


@dataclass(frozen=True, slots=True)
class _Span:
    """The addresses of tensor ``index`` of a group, from ``begin`` up to but not including ``end``."""

    begin: int
    end: int
    group: WeightGroup
    index: int


@dataclass(frozen=True, slots=True)
class _SavedReference:
    """A tensor saved by autograd: a view of tensor ``index`` of a group, ``offset`` bytes from its start."""

    group: WeightGroup
    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _views(group: WeightGroup, memory: Tensor) -> list[Tensor]:
    """Return the group's tensors in a buffer."""
    parts = (memory[weight.offset : weight.offset + weight.nbytes] for weight in group.weights)
    return [
        _view(weight, part.view(weight.placeholder.dtype).view(weight.placeholder.shape))
        for weight, part in zip(group.weights, parts, strict=True)
    ]


def _view(weight: OffloadedWeight, part: Tensor) -> Tensor:
    """Return the tensor for modules: a frozen parameter or a buffer, with a separate version counter."""
    return nn.Parameter(part, requires_grad=False) if isinstance(weight.placeholder, nn.Parameter) else part.data
