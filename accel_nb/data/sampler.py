"""Samplers whose order is a function of seed and epoch only."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler

from accel_nb.errors import MisuseError
from accel_nb.runtime import rng


class SeededOrder:
    """Base of samplers whose order is a function of ``seed`` and the epoch only.

    Each iteration is an epoch, counted from the last one or from `set_epoch`. No global generator is read or changed,
    so ranks and runs agree without communication.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        if not isinstance(epoch, int) or epoch < 0:
            raise MisuseError(f"set_epoch({epoch!r}): an epoch is a whole number of at least 0")
        self._epoch = epoch

    def _generator(self) -> torch.Generator:
        """Return the generator of the epoch."""
        return torch.Generator().manual_seed(rng.derive_seed(self.seed, "epoch", self._epoch))


class SeedableRandomSampler(SeededOrder, Sampler[int]):
    """A ``RandomSampler`` whose order depends only on ``seed`` and the epoch: accelerate's order for the same seed."""

    def __init__(
        self, data_source: Sized, *, seed: int, replacement: bool = False, num_samples: int | None = None
    ) -> None:
        if num_samples is not None and (not isinstance(num_samples, int) or num_samples < 1):
            raise MisuseError(f"num_samples is {num_samples!r}; it must be a whole number from 1, or None for all")
        super().__init__(seed)
        self.data_source = data_source
        self.replacement = replacement
        self._num_samples = num_samples

    @classmethod
    def like(cls, sampler: RandomSampler, *, seed: int) -> SeedableRandomSampler:
        """Return a sampler with the samples, number and replacement of ``sampler``."""
        num_samples = sampler.num_samples
        same = num_samples == len(sampler.data_source)
        return cls(
            sampler.data_source,
            seed=seed,
            replacement=sampler.replacement,
            num_samples=None if same and not sampler.replacement else num_samples,
        )

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + self._epoch)

    def draw_order(self) -> torch.Tensor | None:
        """Return the epoch's whole order and advance to the next epoch; None if it is drawn in several parts."""
        if self.replacement or len(self) > len(self.data_source):
            return None
        order = torch.randperm(len(self.data_source), generator=self._generator())[: len(self)]
        self._epoch += 1
        return order

    def __iter__(self) -> Iterator[int]:
        generator = self._generator()
        self._epoch += 1
        return self._draw(generator)

    def __len__(self) -> int:
        return len(self.data_source) if self._num_samples is None else self._num_samples

    def _draw(self, generator: torch.Generator) -> Iterator[int]:
        length, wanted = len(self.data_source), len(self)
        while wanted > 0 and length > 0:
            if self.replacement:
                drawn = torch.randint(length, (min(wanted, length),), dtype=torch.int64, generator=generator)
            else:
                drawn = torch.randperm(length, generator=generator)[:wanted]
            yield from drawn.tolist()
            wanted -= len(drawn)


def set_epoch(epoch: int, *targets: Any) -> None:
    """Call ``set_epoch`` of each of ``targets`` (samplers, datasets) that has it, once per object."""
    called: set[int] = set()
    for holder in targets:
        setter = getattr(holder, "set_epoch", None)
        if callable(setter) and id(holder) not in called:
            called.add(id(holder))
            setter(epoch)
