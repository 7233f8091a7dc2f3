"""The gradient accumulation window: which micro-batch closes it, and the weight of each loss in it.

A *micro-batch* lasts from one call of an optimizer's step to the next, or is one ``accumulate()`` block. A *window* is
``size`` micro-batches, fewer where a loader ends. Only in the micro-batch that closes the window are gradients averaged
over ranks, and do optimizers step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from accel_nb.config.sections import AccumulationOptions
from accel_nb.data.loader import BatchShare


class AccumulationWindow:
    """Counts micro-batches by backward passes and calls of step; loaders report only the `BatchShare` of each batch."""

    def __init__(
        self,
        size: int,
        world_size: int,
        on_sync: Callable[[bool], None],
        *,
        on_drop: Callable[[], None] = lambda: None,
        options: AccumulationOptions | None = None,
    ) -> None:
        self.number = 0
        self._num_ended = 0
        self.share: BatchShare | None = None
        # Whether a backward pass has run since the latest share was set.
        self._has_passed = False
        # Batches of several loaders were read before one backward pass, divided in different proportions.
        self.has_unequal_shares = False
        # Factors for a loss that is a mean, and for one that is a sum over samples.
        self.mean_factor = 1.0
        self.sum_factor = 1.0
        # Whether the current micro-batch closes the window.
        self.closes = True
        # Whether the micro-batch that began last closes the window: `Accelerator.sync_gradients`.
        self.syncs_gradients = True
        # Whether a backward pass has run in the current micro-batch.
        self.has_backward = False
        # Whether a backward pass has run in the window.
        self.has_gradients = False
        self._size = 1
        self._world_size = world_size
        self._on_sync = on_sync
        self._on_drop = on_drop
        self._options = options or AccumulationOptions()
        self._num_held = 0
        self._is_last = False
        self._in_block = False
        self._last_decision = (True, 0, 1.0)
        # Whether a batch with a backward pass is a micro-batch also where step is not called after it.
        self.counts_batches = True
        # Outside of blocks, since the last call of step: batches that were read, backward passes, and micro-batches
        # that ended where the next batch was read.
        self._num_taken = 0
        self._num_passes = 0
        self._num_passed = 0
        self.size = size

    @property
    def size(self) -> int:
        """How many micro-batches a full window has."""
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size
        self._num_taken = self._num_passes = self._num_passed = 0
        self._weigh()
        self._decide()

    @property
    def is_divided(self) -> bool:
        """Whether this rank has read only a part of the current batch."""
        return self.share is not None and not self.share.is_whole

    @property
    def averages_gradients(self) -> bool:
        """Whether the current micro-batch's backward pass averages gradients over ranks."""
        return self.closes or self._options.sync_each_batch

    @property
    def is_in_block(self) -> bool:
        """Whether the current micro-batch is an ``accumulate()`` block."""
        return self._in_block

    @property
    def accumulates_in_script(self) -> bool:
        """Whether the script has summed up several batches before this step, and fewer than a window has.

        Or it has read more batches ahead than it has trained on, so that backward passes cannot be matched to batches.
        """
        return self._num_taken > 1 and self._num_passes > 1 and not (self.closes and self._num_passed)

    @property
    def num_pending(self) -> int:
        """How many micro-batches of this window are done; a block counts after its first backward pass."""
        if self._in_block and self.has_backward:
            return 0 if self.closes else self._num_held + 1
        return self._num_held

    @property
    def num_trained(self) -> int:
        """How many micro-batches have been trained on: stepped, or with gradients in the window."""
        return self._num_ended + (self._in_block and self.has_backward)

    def resume(self, num_pending: int) -> None:
        """Continue a window of which ``num_held`` micro-batches are done; 0 begins a new one."""
        self._num_held = num_pending
        self.has_backward = False
        self.has_gradients = num_pending > 0
        self._decide()

    def set_share(self, share: BatchShare | None) -> None:
        """Set which share of its global batch the next micro-batch is; None when a loader's iteration has ended."""
        if share is not None and self.share is not None and not self._has_passed and not share.is_whole:
            before = self.share
            self.has_unequal_shares |= (
                share.num_samples * before.total_samples != before.num_samples * share.total_samples
            )
        self._has_passed = False
        self.share = share
        self._is_last = share is not None and share.is_last
        self._weigh()
        if not self._in_block:
            if share is not None and self.has_backward and self.counts_batches and self._size > 1:
                self._num_held += 1
                self._num_ended += 1
                self._num_passed += 1
                self.has_backward = False
            self._num_taken = 0 if share is None else self._num_taken + 1
            self._decide()

    def record_backward(self) -> None:
        """Record a backward pass."""
        self._has_passed = True
        self._num_passes += 1
        self.has_backward = True
        self.has_gradients = True

    def discard(self) -> None:
        """Discard the micro-batches of the window, which will not be stepped: the next one begins a new window."""
        self.has_backward = self.has_gradients = False
        self._num_held = 0
        self._decide()

    def step_decision(self) -> tuple[bool, int, float]:
        """Return whether the window closes, its number, and the factor for its gradients, for clipping and stepping.

        The factor turns the gradients of a short window into the mean over its own micro-batches.
        """
        if self.has_backward or self._in_block:
            return self.closes, self.number, self._size / (self._num_held + 1)
        return self._last_decision  # another optimizer after the same backward pass

    def begin_step(self) -> tuple[bool, int, float]:
        """End the micro-batch, since an optimizer is about to step, and return its `step_decision`."""
        if self._size == 1 and not self._in_block:  # every micro-batch is a window
            number = self.number
            self._last_decision = decision = (True, number, 1.0)
            self.syncs_gradients = True
            self.has_backward = self.has_gradients = self._is_last = False
            self.number = number + 1
            self._num_ended += 1
            return decision
        decision = self.step_decision()
        if self.has_backward and not self._in_block:
            self._last_decision = decision
            self.syncs_gradients = decision[0]
            self._end_micro_batch()
        return decision

    def __enter__(self) -> None:
        """Begin a micro-batch that ends with the block."""
        self._decide()
        self.syncs_gradients = self.closes
        self._in_block = True
        self.has_backward = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the micro-batch; a block that raised is not counted."""
        self._in_block = False
        if kind is None:
            self._last_decision = (self.closes, self.number, self._size / (self._num_held + 1))
            self._end_micro_batch()
        self.has_backward = False

    def _end_micro_batch(self) -> None:
        self.has_backward = False
        self._num_taken = self._num_passes = self._num_passed = 0
        self._num_ended += 1
        is_last, self._is_last = self._is_last, False
        is_dropped = is_last and not self.closes and self._options.tail == "drop"
        if self.closes or is_dropped:
            self.number += 1
            self._num_held = 0
            self.has_gradients = False
            if is_dropped:
                self._on_drop()
        else:
            self._num_held += 1
        self._decide()

    def _decide(self) -> None:
        closes = self._num_held + 1 >= self._size or (self._is_last and self._options.tail == "step")
        if closes != self.closes:
            self.closes = closes
            self._on_sync(self.averages_gradients)

    def _weigh(self) -> None:
        share, world_size = self.share, self._world_size
        weight, sum_weight = 1.0, 1.0
        if share is not None and share.total_samples and not share.is_whole:
            weight = world_size * share.num_samples / share.total_samples
            sum_weight = float(world_size) if share.num_samples else 0.0
        self.mean_factor = weight / self._size
        self.sum_factor = sum_weight / self._size
