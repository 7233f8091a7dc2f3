"""Weights that pass through a few buffers: read ahead of the computation in the order that it was seen to take.

A *unit* is what is needed at once: a block, or a module with weights of its own. Buffers are bounded in bytes and used
again. What is needed soonest is read first, unless the lane gains nothing by that; what is needed last gives way, so
that buffers beyond those of the read-ahead keep a part of the model from one forward to the next.
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

from accel_nb.bigmodel.host_memory import aligned
from accel_nb.bigmodel.offload.mmap_weights import Loan
from accel_nb.bigmodel.offload.weight_transfer import HostTensor, Lane, Source, lend
from accel_nb.errors import AccelNbError, MisuseError

_IDLE_S = 0.25
"""After so long without work a reader's thread ends; the next forward starts another."""
_AHEAD_BYTES = 32 << 20
"""Units smaller than this in all are read ahead together."""


class OffloadError(AccelNbError, OSError):
    """Weights could not be read where they had been left."""


@dataclass(eq=False)
class Piece:
    """One tensor of a unit: where it comes from, and the places in modules that it is put into."""

    name: str
    source: Source
    empty: Tensor
    """What the modules hold while it is away, on the meta device."""
    places: list[tuple[dict[str, Any], str]]
    aliases: tuple[str, ...] = ()
    """All names that the tensor goes by in the model."""
    was_trainable: bool = False
    begin: int = 0
    """Its place in the unit's buffer, in bytes."""

    @property
    def nbytes(self) -> int:
        """Its size in the buffer."""
        return self.empty.numel() * self.empty.dtype.itemsize


class Unit:
    """The tensors that are needed at once."""

    def __init__(
        self, name: str, pieces: Sequence[Piece], *, rows_only: bool = False, holds_others: bool = False
    ) -> None:
        self.name = name
        self.pieces = tuple(pieces)
        self.rows_only = rows_only
        """Whether few rows of its tensors are looked up, and no more."""
        self.holds_others = holds_others
        """Whether other units come and go while it computes."""
        self.nbytes = 0
        for piece in self.pieces:
            piece.begin = self.nbytes
            self.nbytes += aligned(piece.nbytes)

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.nbytes} bytes)"


@dataclass(eq=False)
class _Buffer:
    nbytes: int
    memory: Tensor | None
    """None if the unit that it is for is computed with where its tensors lie, which are given back after each use."""
    loan: Loan | None = None
    marks: list[Any] = field(default_factory=list)
    """Of computations that may still read it."""
    views: dict[Unit, list[Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class _Stay:
    """A unit in a buffer."""

    buffer: _Buffer
    state: Literal["filling", "ready", "stale", "failed"] = "filling"
    """``stale``: the buffer does not hold what the weights are by now."""
    users: int = 0
    ticket: Any = None
    error: BaseException | None = None
    versions: list[int] = field(default_factory=list)
    """Of its tensors when they were put into the modules."""
    is_put: bool = False


class _Thread(threading.local):
    """What one computing thread has done, and so is going to do."""

    def __init__(self) -> None:
        self.seen: list[Unit] = []
        self.next = 0
        self.depth = 0


class WeightStream:
    """Gives units their weights while they compute; several threads may compute at once.

    ``budget`` bounds the buffers, in bytes. It is exceeded only while the units that compute at this moment need more
    by themselves, as several forwards in flight may.
    """

    def __init__(self, units: Sequence[Unit], lane: Lane, budget: int, *, num_readers: int = 1) -> None:
        self._lane = lane
        self._budget = budget
        self._num_readers = num_readers
        self._changed = threading.Condition()
        self._stays: dict[Unit, _Stay] = {}
        self._idle: list[_Buffer] = []
        self._allocated = 0
        self._order: list[Unit] = []
        self._positions: dict[Unit, list[int]] = {}
        self._now = 0
        self._near: dict[int, list[Unit]] = {}
        self._readers: list[threading.Thread] = []
        self._is_over = threading.Event()
        # A thread that is still in torch when the interpreter goes away takes the process down with it.
        self.stop_readers = weakref.finalize(self, _end_readers, self._is_over, self._changed, self._readers)
        """Waits until nothing is read ahead any more; called by itself when the interpreter ends."""
        self._own = _Thread()
        self.num_fills = 0
        """How many times a unit was read."""
        self.peak_bytes = 0
        """The most that buffers have taken."""
        self._follow(units)

    def begin(self) -> None:
        """Start a forward of the whole model: what this thread did since its last one is the order to expect."""
        own = self._own
        own.depth += 1
        if own.depth == 1:
            if own.seen:
                with self._changed:
                    self._follow(own.seen)
            own.seen, own.next = [], 0

    def end(self, *, completed: bool) -> None:
        """End a forward of the whole model; one that did not complete teaches nothing."""
        self._own.depth -= 1
        if not self._own.depth:
            if not completed:
                self._own.seen = []
            alive = {thread.ident for thread in threading.enumerate()}
            with self._changed:
                self._near = {ident: near for ident, near in self._near.items() if ident in alive}

    def acquire(self, unit: Unit) -> None:
        """Put the unit's weights in place, waiting for them if need be; raises `OffloadError`."""
        with self._changed:
            self._expect_after(unit)
            stay = self._stays.get(unit)
            reads = stay is None
            if stay is None:
                buffer = self._buffer_for(unit, needed=True)
                assert buffer is not None, "what is needed at once always gets a buffer"
                stay = self._stays[unit] = _Stay(buffer)
            stay.users += 1
        try:
            if reads:
                self._fill(unit, stay)
            with self._changed:
                while stay.state == "filling":
                    self._changed.wait()
                if stay.state == "failed":
                    raise OffloadError(f"the weights of {unit.name} cannot be read: {stay.error}") from stay.error
                if not stay.is_put:
                    if stay.buffer.loan is not None:
                        stay.buffer.loan.begin()
                    self._put(unit, stay)
            self._lane.ready(stay.ticket)
        except BaseException as error:  # an interrupt may come at any point of this
            with self._changed:
                stay.users -= 1
                self._let_go(unit, stay)
            if isinstance(error, OSError) and not isinstance(error, OffloadError):
                raise OffloadError(f"the weights of {unit.name} cannot be read: {error}") from error
            raise

    def release(self, unit: Unit) -> None:
        """Take the weights away again; what was changed in place is kept in memory from now on."""
        with self._changed:
            stay = self._stays[unit]
            if stay.buffer.memory is not None and (mark := self._lane.mark(stay.buffer.memory)) is not None:
                stay.buffer.marks.append(mark)
            stay.users -= 1
            self._let_go(unit, stay)
            if self._near.get(threading.get_ident()):  # what does not stay for the next forward has left its room
                self._look_ahead(self._budget)

    def saved_tensors_hooks(self, unit: Unit) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Return what autograd must do with tensors of a unit that it keeps: note them, and fetch them when needed."""
        views = self._stays[unit].buffer.views[unit]
        spans = [(view.data_ptr(), view.data_ptr() + view.nbytes, at) for at, view in enumerate(views)]
        device = self._lane.device

        def pack(tensor: Tensor) -> Any:
            start = tensor.data_ptr() if tensor.device == device else 0
            for begin, end, at in spans:
                if begin <= start < end:
                    return _Noted(unit, at, tensor.dtype, tuple(tensor.shape), tensor.stride(), start - begin)
            return tensor

        return pack, self._fetch

    def close(self) -> None:
        """Let go of all buffers; no forward may be running."""
        with self._changed:
            self._near.clear()
            self._stays.clear()
            self._idle.clear()
            self._allocated = 0
            self._changed.notify_all()

    def _fetch(self, noted: Any) -> Tensor:
        if not isinstance(noted, _Noted):
            return noted
        self.acquire(noted.unit)
        try:
            view = self._stays[noted.unit].buffer.views[noted.unit][noted.at].detach()
            flat = view.reshape(-1).view(torch.uint8)[noted.offset :]
            flat = flat[: flat.numel() // noted.dtype.itemsize * noted.dtype.itemsize].view(noted.dtype)
            return flat.as_strided(noted.shape, noted.stride, flat.storage_offset()).clone()
        finally:
            self.release(noted.unit)

    # --- all below hold the lock, but for `_fill` and `_read_ahead` ---

    def _follow(self, order: Sequence[Unit]) -> None:
        if list(order) != self._order:
            self._order = list(order)
            self._positions = {}
            for position, unit in enumerate(order):
                self._positions.setdefault(unit, []).append(position)

    def _expect_after(self, unit: Unit) -> None:
        """Note where in the order this thread is, and what it needs next."""
        own, order = self._own, self._order
        if len(own.seen) > 8 * len(order):  # parts of the model are called by themselves, without an end
            own.seen = []
        own.seen.append(unit)
        if own.next >= len(order) or order[own.next] is not unit:
            places = self._positions.get(unit)
            if not places:
                return
            at = bisect_left(places, own.next)
            own.next = places[at] if at < len(places) else places[0]
        self._now = own.next
        own.next = (own.next + 1) % len(order)
        self._look_ahead(self._budget - unit.nbytes)

    def _look_ahead(self, room: int) -> None:
        """Wish for what this thread needs next, as far as there is room for it."""
        order, begin = self._order, self._own.next
        near: list[Unit] = []
        ahead = 0
        for step in range(len(order) - 1):
            other = order[(begin + step) % len(order)]
            room -= other.nbytes
            if room < 0 or (step > self._num_readers and ahead >= min(_AHEAD_BYTES, self._budget // 2)):
                break
            ahead += other.nbytes
            if other in self._stays or self._lane.gains_by_reading_ahead([piece.source for piece in other.pieces]):
                near.append(other)
        self._near[threading.get_ident()] = near
        if any(other not in self._stays for other in near):
            self._wake_readers()

    def _wake_readers(self) -> None:
        self._readers[:] = [reader for reader in self._readers if reader.is_alive()]
        while not self._is_over.is_set() and len(self._readers) < self._num_readers:
            reader = threading.Thread(target=self._read_ahead, name="accel_nb-read-ahead", daemon=True)
            self._readers.append(reader)
            reader.start()
        self._changed.notify_all()

    def _read_ahead(self) -> None:
        """Read what is needed soon into buffers, until there has been nothing to do for a while."""
        while not self._is_over.is_set():
            with self._changed:
                found = self._next_wish()
                if found is None and not self._changed.wait(_IDLE_S):
                    found = self._next_wish()
                    if found is None:
                        self._readers.remove(threading.current_thread())
                        return
                if found is None:
                    continue
            self._fill(*found)

    def _next_wish(self) -> tuple[Unit, _Stay] | None:
        for near in self._near.values():
            for unit in near:
                if unit in self._stays:
                    continue
                buffer = self._buffer_for(unit, needed=False)
                if buffer is None:
                    break
                stay = self._stays[unit] = _Stay(buffer)
                return unit, stay
        return None

    def _fill(self, unit: Unit, stay: _Stay) -> None:
        """Read a unit into its buffer; without the lock."""
        try:
            ticket = self._lent(unit, stay.buffer) if stay.buffer.memory is None else self._copied(unit, stay.buffer)
        except BaseException as error:
            with self._changed:
                stay.state, stay.error = "failed", error
                self._near = {own: [other for other in near if other is not unit] for own, near in self._near.items()}
                self._let_go(unit, stay)
            if not isinstance(error, Exception):
                raise
            return
        with self._changed:
            stay.ticket, stay.state = ticket, "ready"
            self.num_fills += stay.buffer.memory is not None
            self._changed.notify_all()

    def _lent(self, unit: Unit, buffer: _Buffer) -> None:
        """Let the unit's tensors be computed with where they lie; without the lock."""
        loan = lend([piece.source for piece in unit.pieces], rows_only=unit.rows_only)
        with torch.inference_mode(False):  # the tensors outlive the mode that the caller is in
            views = [_view(piece, tensor) for piece, tensor in zip(unit.pieces, loan.tensors, strict=True)]
        buffer.loan, buffer.views = loan, {unit: views}

    def _copied(self, unit: Unit, buffer: _Buffer) -> Any:
        """Fill the memory of a buffer and return the lane's ticket; without the lock."""
        marks, buffer.marks = buffer.marks, []
        if unit not in buffer.views:
            assert buffer.memory is not None
            with torch.inference_mode(False):
                buffer.views = {**buffer.views, unit: _views(unit, buffer.memory)}
        jobs = [(piece.source, view.detach()) for piece, view in zip(unit.pieces, buffer.views[unit], strict=True)]
        return self._lane.fill(jobs, marks)

    def _lends(self, unit: Unit) -> bool:
        """Whether the unit is computed with where its tensors lie, which nobody may write to meanwhile."""
        if unit.holds_others:
            return False
        return all(piece.source.dtype == piece.empty.dtype for piece in unit.pieces) and self._lane.can_lend(
            [piece.source for piece in unit.pieces], rows_only=unit.rows_only
        )

    def _let_go(self, unit: Unit, stay: _Stay) -> None:
        """Take the weights of a unit that nobody uses out of the modules; it stays in its buffer if all is well."""
        if not stay.users and self._stays.get(unit) is stay:
            try:
                if stay.is_put:
                    self._take(unit, stay)
            finally:
                if stay.buffer.loan is not None:
                    stay.buffer.loan.end()
            is_over_budget = self._allocated > self._budget and stay.state != "filling"
            if is_over_budget or (stay.buffer.memory is None and stay.state != "filling"):
                self._allocated -= self._stays.pop(unit).buffer.nbytes
            elif stay.state in ("failed", "stale"):  # the next forward reads it again
                self._idle.append(self._stays.pop(unit).buffer)
        self._changed.notify_all()

    def _buffer_for(self, unit: Unit, *, needed: bool) -> _Buffer | None:
        """Return a buffer that holds the unit, making room by what is needed last; None if it would have to wait."""
        lends = self._lends(unit)
        best = self._idle_for(unit, lends)
        if best is None and self._allocated + unit.nbytes > self._budget:
            self._make_room(unit, lends, needed=needed)
            best = self._idle_for(unit, lends)
        if best is not None:
            self._idle.remove(best)
            return best
        if self._allocated + unit.nbytes > self._budget and not needed:
            return None
        self._allocated += unit.nbytes
        self.peak_bytes = max(self.peak_bytes, self._allocated)
        if lends:
            return _Buffer(unit.nbytes, None)
        with torch.inference_mode(False):
            memory = self._lane.allocate(unit.nbytes)
        # An allocator may give memory that computations before this one still read.
        mark = self._lane.mark(memory)
        return _Buffer(unit.nbytes, memory, marks=[] if mark is None else [mark])

    def _idle_for(self, unit: Unit, lends: bool) -> _Buffer | None:
        """Return the smallest buffer without a unit that holds this one, if it needs memory of a buffer."""
        fitting = [] if lends else [buffer for buffer in self._idle if buffer.nbytes >= unit.nbytes]
        return min(fitting, key=lambda buffer: buffer.nbytes, default=None)

    def _make_room(self, unit: Unit, lends: bool, *, needed: bool) -> None:
        """Let go of units that are needed later than this one, the last first, until a buffer fits or can be made."""
        near = {other for own in self._near.values() for other in own}
        limit = -1 if needed else self._distance(unit)
        gone = [
            other
            for other, stay in self._stays.items()
            if not stay.users and stay.state == "ready" and (needed or other not in near)
            and self._distance(other) > limit
        ]  # fmt: skip
        for other in [*sorted(gone, key=self._distance, reverse=True), None]:
            while self._idle and self._allocated + unit.nbytes > self._budget:
                self._allocated -= self._idle.pop().nbytes
            if other is None or self._allocated + unit.nbytes <= self._budget:
                return
            buffer = self._stays.pop(other).buffer
            if buffer.memory is None:
                self._allocated -= buffer.nbytes
            else:
                self._idle.append(buffer)
                if self._idle_for(unit, lends) is not None:
                    return

    def _distance(self, unit: Unit) -> int:
        """Return after how many units this one is needed, by the order that is expected."""
        places = self._positions.get(unit)
        if not places:
            return len(self._order) + 1
        at = bisect_left(places, self._now + 1)
        return (places[at] if at < len(places) else places[0] + len(self._order)) - self._now

    def _put(self, unit: Unit, stay: _Stay) -> None:
        views = stay.buffer.views[unit]
        for piece, view in zip(unit.pieces, views, strict=True):
            for holder, leaf in piece.places:
                holder[leaf] = view
        stay.versions = [view._version for view in views]
        stay.is_put = True

    def _take(self, unit: Unit, stay: _Stay) -> None:
        stay.is_put = False
        for piece, view, version in zip(unit.pieces, stay.buffer.views[unit], stay.versions, strict=True):
            holder, leaf = piece.places[0]
            now: Tensor = holder[leaf]
            for place, name in piece.places:
                place[name] = piece.empty
            if now is not view or view._version != version:
                if now.shape != view.shape or now.dtype != view.dtype:
                    raise MisuseError(
                        f"a forward has put another {piece.name} in place of the one that is offloaded, of shape "
                        f"{tuple(now.shape)} and {now.dtype}; keep buffers in memory (offload_buffers=False)"
                    )
                piece.source = HostTensor(now.detach().to("cpu", copy=True))
                if now is not view:
                    stay.state = "stale"


def _end_readers(is_over: threading.Event, changed: threading.Condition, readers: list[threading.Thread]) -> None:
    """Wait until the readers have ended what they are reading."""
    is_over.set()
    with changed:
        changed.notify_all()
        alive = [reader for reader in readers if reader is not threading.current_thread()]
    for reader in alive:
        reader.join()


@dataclass(frozen=True, slots=True)
class _Noted:
    """A tensor that autograd wants back: a part of a unit's tensor number ``at``, ``offset`` in bytes."""

    unit: Unit
    at: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def _views(unit: Unit, memory: Tensor) -> list[Tensor]:
    """Return the unit's tensors in a buffer."""
    parts = (memory[piece.begin : piece.begin + piece.nbytes] for piece in unit.pieces)
    return [
        _view(piece, part.view(piece.empty.dtype).view(piece.empty.shape))
        for piece, part in zip(unit.pieces, parts, strict=True)
    ]


def _view(piece: Piece, part: Tensor) -> Tensor:
    """Return what modules are to hold: a frozen parameter or a buffer, with a version count of its own."""
    return nn.Parameter(part, requires_grad=False) if isinstance(piece.empty, nn.Parameter) else part.data
