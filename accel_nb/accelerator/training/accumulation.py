"""The gradient accumulation window: which micro-batch closes it, and the weight of each loss in it.

A *micro-batch* lasts from one call of an optimizer's step to the next, or is one ``accumulate()`` block. A *window* has
``size`` micro-batches, fewer where a loader ends. The last micro-batch *closes* the window: gradients are averaged over
ranks, and optimizers step.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from accel_nb.config.sections import AccumulationOptions
from accel_nb.data.order import BatchShare


class AccumulationWindow:
    """Counts micro-batches by backward passes and calls of step; loaders report the `BatchShare` of each batch."""

    def __init__(
        self,
        size: int,
        world_size: int,
        on_sync: Callable[[], None],
        *,
        on_drop: Callable[[], None] = lambda: None,
        options: AccumulationOptions | None = None,
    ) -> None:
        self.number = 0
        self._num_ended = 0
        self.share: BatchShare | None = None
        # Whether a backward pass has run since the share was set.
        self._has_share_backward = False
        # Whether batches of several loaders, divided in different proportions, were read before one backward pass.
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
        self._tail = (options or AccumulationOptions()).tail
        self._num_in_window = 0
        self._is_last_batch = False
        self._in_block = False
        self._last_decision = (True, 0, 1.0)
        # Whether a batch with a backward pass counts as a micro-batch even if step is not called after it.
        self.counts_batches = True
        # Whether only blocks are micro-batches of windows: a backward pass outside of them is a separate window.
        self.counts_blocks_only = False
        # Whether the gradients of a short window are the mean over its own micro-batches, and not over `size`.
        self.rescales_short_windows = True
        self._averages_each_batch = options is not None and options.sync_each_batch
        # Since the last call of step, outside of blocks: how many batches were read, how many backward passes ran, and
        # how many micro-batches ended because the next batch was read.
        self._num_read = 0
        self._num_backward = 0
        self._num_ended_by_read = 0
        self.size = size

    @property
    def size(self) -> int:
        """The number of micro-batches of a full window."""
        return self._size

    @size.setter
    def size(self, size: int) -> None:
        self._size = size
        self._num_read = self._num_backward = self._num_ended_by_read = 0
        self._update_factors()
        self._update_closes()

    @property
    def even_factor(self) -> float:
        """The factor of a loss over a share that has no weight."""
        return 1.0 / self._size

    @property
    def has_uneven_share(self) -> bool:
        """Whether a mean over the current share has another factor than in an evenly divided batch."""
        return self.mean_factor not in (0.0, self.even_factor)

    @property
    def is_divided(self) -> bool:
        """Whether this rank has read only a part of the current batch."""
        return self.share is not None and not self.share.is_whole

    @property
    def averages_gradients(self) -> bool:
        """Whether the current micro-batch's backward pass averages gradients over ranks."""
        return self.closes or self._averages_each_batch

    @property
    def averages_each_batch(self) -> bool:
        """Whether gradients are averaged over ranks after every micro-batch, and not once for each window."""
        return self._averages_each_batch

    @averages_each_batch.setter
    def averages_each_batch(self, enabled: bool) -> None:
        self._averages_each_batch = enabled
        self._on_sync()

    @property
    def is_in_block(self) -> bool:
        """Whether the current micro-batch is an ``accumulate()`` block."""
        return self._in_block

    @property
    def accumulates_in_script(self) -> bool:
        """Whether the script itself has summed up the gradients of several batches before this step.

        True if these are fewer batches than a window has, or if the script has read batches ahead, so that backward
        passes cannot be matched to batches.
        """
        return self._num_read > 1 and self._num_backward > 1 and not (self.closes and self._num_ended_by_read)

    @property
    def num_pending(self) -> int:
        """The number of complete micro-batches of this window; a block counts from its first backward pass on."""
        if self._in_block and self.has_backward:
            return 0 if self.closes else self._num_in_window + 1
        return self._num_in_window

    @property
    def num_trained(self) -> int:
        """The total number of micro-batches that were trained on, including the open window."""
        return self._num_ended + (self._in_block and self.has_backward)

    def resume(self, num_pending: int) -> None:
        """Continue a window of which ``num_pending`` micro-batches are complete; 0 begins a new one."""
        self._num_in_window = num_pending
        self.has_backward = False
        self.has_gradients = num_pending > 0
        self._update_closes()

    def set_share(self, share: BatchShare | None) -> None:
        """Set the share of the global batch that this rank has read; None at the end of a loader's iteration."""
        if share is not None and self.share is not None and not self._has_share_backward and not share.is_whole:
            before = self.share
            self.has_unequal_shares |= (
                share.num_samples * before.total_samples != before.num_samples * share.total_samples
            )
        self._has_share_backward = False
        self.share = share
        self._is_last_batch = share is not None and share.is_last
        self._update_factors()
        if not self._in_block:
            counts = self.counts_batches and not self.counts_blocks_only
            if share is not None and self.has_backward and counts and self._size > 1:
                self._num_in_window += 1
                self._num_ended += 1
                self._num_ended_by_read += 1
                self.has_backward = False
            self._num_read = 0 if share is None else self._num_read + 1
            self._update_closes()

    def record_backward(self) -> None:
        """Record a backward pass."""
        self._has_share_backward = True
        self._num_backward += 1
        self.has_backward = True
        self.has_gradients = True

    def discard(self) -> None:
        """Discard the micro-batches of the window, for which no step follows; the next one begins a new window."""
        self.has_backward = self.has_gradients = False
        self._num_in_window = self._num_read = self._num_backward = self._num_ended_by_read = 0
        self._update_closes()

    def step_decision(self) -> tuple[bool, int, float]:
        """Return whether the micro-batch closes the window, the window's number, and the factor for its gradients.

        The factor makes the gradients of a short window the mean over its own micro-batches.
        """
        if self.has_backward or self._in_block:
            return self.closes, self.number, self._factor
        return self._last_decision  # another optimizer after the same backward pass

    def begin_step(self) -> tuple[bool, int, float]:
        """Return the `step_decision` for an optimizer that is about to step, and end the micro-batch."""
        # Every micro-batch is a window.
        if not self._in_block and (self._size == 1 or (self.counts_blocks_only and self.closes)):
            number = self.number
            self._last_decision = decision = (True, number, 1.0)
            self.syncs_gradients = True
            self.has_backward = self.has_gradients = self._is_last_batch = False
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
        self._in_block = True
        self._update_closes()
        self.syncs_gradients = self.closes
        self.has_backward = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the micro-batch; a block that raised is not counted."""
        self._in_block = False
        if kind is None:
            self._last_decision = (self.closes, self.number, self._factor)
            self._end_micro_batch()
        self.has_backward = False

    def _end_micro_batch(self) -> None:
        self.has_backward = False
        self._num_read = self._num_backward = self._num_ended_by_read = 0
        self._num_ended += 1
        is_last, self._is_last_batch = self._is_last_batch, False
        is_dropped = is_last and not self.closes and self._tail == "drop"
        if self.closes or is_dropped:
            self.number += 1
            self._num_in_window = 0
            self.has_gradients = False
            if is_dropped:
                self._on_drop()
        else:
            self._num_in_window += 1
        self._update_closes()

    @property
    def _factor(self) -> float:
        return self._size / (self._num_in_window + 1) if self.rescales_short_windows else 1.0

    def _update_closes(self) -> None:
        closes = self._num_in_window + 1 >= self._size or (self._is_last_batch and self._tail == "step")
        if self.counts_blocks_only and not self._in_block:
            closes = self.syncs_gradients
        if closes != self.closes:
            self.closes = closes
            self._on_sync()

    def _update_factors(self) -> None:
        share, world_size = self.share, self._world_size
        weight, sum_weight = 1.0, 1.0
        if share is not None and share.total_samples and not share.is_whole:
            weight = world_size * share.num_samples / share.total_samples
            sum_weight = float(world_size) if share.num_samples else 0.0
        self.mean_factor = weight / self._size
        self.sum_factor = sum_weight / self._size
