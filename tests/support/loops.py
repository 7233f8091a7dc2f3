"""An observer of loops over sharded loaders that records the shares of the batches."""

from __future__ import annotations

from typing import Any

from accel_nb.data.order import BatchShare


class Loops:
    """Loops that all train; ``shares`` receives the share of each batch, and None at the end."""

    def __init__(self, shares: list[BatchShare | None] | None = None) -> None:
        self.shares = [] if shares is None else shares

    def is_training(self) -> bool:
        return True

    def on_loop_start(self, loader: Any) -> None:
        pass

    def on_epoch_start(self, loader: Any) -> bool:
        return self.is_training()

    def on_batch_end(self) -> None:
        pass

    def on_read(self, started: float, cpu_started: float) -> None:
        pass

    def on_share(self, share: BatchShare | None) -> None:
        self.shares.append(share)

    def on_whole_batch(self, iterator: Any, num_samples: int | None) -> None:
        pass

    def num_trained(self) -> int:
        return 0
