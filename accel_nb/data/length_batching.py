"""Batches of samples of about equal length, to reduce padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import Sampler

from accel_nb.data.sampler import SeededOrder
from accel_nb.errors import MisuseError


class LengthBatchSampler(SeededOrder, Sampler[list[int]]):
    """Batch sampler that groups samples of about the same length; each sample occurs once in an epoch.

    Samples are shuffled, sorted by length within pools of ``pool`` batches, divided into batches, and the batches are
    shuffled; a short one is last. The order depends only on ``seed`` and the epoch, so it is the same on every rank.
    Without ``shuffle`` all samples are sorted together, the shortest first.

    Args:
        lengths: The length of each sample, in tokens or frames.
        batch_size: Maximum number of samples in a batch.
        max_tokens: Maximum number of tokens in a padded batch: its longest sample times its samples. At least one of
            the two must be given.
        multiple_of: Lengths are padded to a multiple of this number, which counts towards ``max_tokens``.
        shuffle: Whether each epoch has a new order.
        seed: Seed of the order.
        drop_last: Leave out a last batch of fewer than ``batch_size`` samples; not with ``max_tokens``.
        pool: Number of batches whose samples are sorted together: larger values reduce padding, smaller ones make
            batches more random.

    Raises `MisuseError` for a limit below 1, without ``batch_size`` and ``max_tokens``, and for a sample longer than
    ``max_tokens``.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray | torch.Tensor,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        multiple_of: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pool: int = 50,
    ) -> None:
        super().__init__(seed)
        for name, limit in (
            ("batch_size", batch_size), ("max_tokens", max_tokens), ("multiple_of", multiple_of), ("pool", pool),
        ):  # fmt: skip
            if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
                raise MisuseError(f"LengthBatchSampler({name}={limit!r}): it must be a whole number of at least 1")
        if batch_size is None and max_tokens is None:
            raise MisuseError(
                "LengthBatchSampler needs batch_size, max_tokens or both, which limit the size of a batch"
            )
        if drop_last and max_tokens is not None:
            raise MisuseError(
                "LengthBatchSampler(drop_last=True) with max_tokens: then no batch is short; leave one out"
            )
        # With a limit on tokens, batches other than the last may have fewer samples.
        self.batch_size = batch_size if max_tokens is None else None
        self.drop_last = drop_last
        self.shuffle = shuffle
        self._limit = batch_size
        self._max_tokens = max_tokens
        self._pool = pool
        self._lengths = _checked(lengths, multiple_of, max_tokens)
        # The batches of an epoch, with the values that they depend on.
        self._planned: tuple[tuple[int, int, bool], list[list[int]]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        plan = self._plan()
        self._epoch += 1
        return map(list, plan)  # code may change a batch that it gets

    def __len__(self) -> int:
        """Return the number of batches in the next epoch."""
        return len(self._plan())

    def _plan(self) -> list[list[int]]:
        """Return the batches of the epoch."""
        key = self._epoch if self.shuffle else 0, self.seed, self.shuffle
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._batches(self._generator() if self.shuffle else None)
        return self._planned[1]

    def _batches(self, generator: torch.Generator | None) -> list[list[int]]:
        count = len(self._lengths)
        if generator is None:
            batches = self._split(np.argsort(self._lengths, kind="stable"))
        else:
            order = torch.randperm(count, generator=generator).numpy()
            pool = self._pool * (self._limit or self._mean_batch_size())
            pools = [order[start : start + pool] for start in range(0, count, pool)]
            batches = [
                batch for part in pools for batch in self._split(part[np.argsort(self._lengths[part], kind="stable")])
            ]
        size = self.batch_size
        full = [batch for batch in batches if size is None or len(batch) == size]
        short = [batch for batch in batches if size is not None and len(batch) < size]
        if generator is not None:
            full = [full[number] for number in torch.randperm(len(full), generator=generator).tolist()]
        return full if self.drop_last else full + short

    def _split(self, ordered: np.ndarray) -> list[list[int]]:
        """Divide indices, the shortest sample first, into batches within the limits."""
        limit, most = self._limit or len(ordered), self._max_tokens
        batches: list[list[int]] = []
        batch: list[int] = []
        for index, length in zip(ordered.tolist(), self._lengths[ordered].tolist(), strict=True):
            if batch and (len(batch) == limit or (most is not None and (len(batch) + 1) * length > most)):
                batches.append(batch)
                batch = []
            batch.append(index)
        return [*batches, batch] if batch else batches

    def _mean_batch_size(self) -> int:
        mean = float(self._lengths.mean()) if len(self._lengths) else 1.0
        return max(1, int((self._max_tokens or 1) / max(mean, 1.0)))


def _checked(
    lengths: Sequence[int] | np.ndarray | torch.Tensor, multiple_of: int, max_tokens: int | None
) -> np.ndarray:
    found = np.asarray(lengths)
    if found.size == 0:
        return np.zeros(0, dtype=np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu" or found.min() < 0:
        raise MisuseError(
            "the lengths of LengthBatchSampler are one whole number of at least 0 for each sample, such as "
            f"[len(text) for text in dataset], not {type(lengths).__name__} of shape {found.shape}, type {found.dtype}"
        )
    padded = -(-found.astype(np.int64) // multiple_of) * multiple_of
    if max_tokens is not None and padded.max() > max_tokens:
        worst = int(padded.argmax())
        raise MisuseError(
            f"sample {worst} is {int(padded[worst])} tokens long (padded), more than max_tokens={max_tokens}: no batch "
            "can hold it. Raise max_tokens, or cut or leave out long samples"
        )
    return padded
