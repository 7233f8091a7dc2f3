"""The precision in which torch computes products and convolutions of float32 numbers, as a setting of a process."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PARTS = (
    "", "cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.conv", "mkldnn.matmul", "mkldnn.rnn"
)  # fmt: skip
"""Parts of `torch.backends` with a ``fp32_precision``, each after those from which it inherits one."""


def read_fp32_precision(torch: Any) -> list[Any]:
    """Return the precision of matrix products, whether cuDNN may use TF32, and the precision of each part.

    The first two are None if the third contradicts them, which torch raises as an error. Before torch 2.9 there are no
    parts.
    """
    with _quiet(torch):
        found = [_read(torch.get_float32_matmul_precision), _read(lambda: torch.backends.cudnn.allow_tf32)]
        return [*found, {name: part.fp32_precision for name, part in _parts(torch)}]


def set_fp32_precision(torch: Any, values: list[Any]) -> None:
    """Set what `read_fp32_precision` has returned. Equal values are not set: a part then inherits as it did."""
    matmul, cudnn_allows, by_part = values
    now = read_fp32_precision(torch)
    with _quiet(torch):
        if matmul not in (None, now[0]):
            torch.set_float32_matmul_precision(matmul)
        if cudnn_allows not in (None, now[1]):
            torch.backends.cudnn.allow_tf32 = cudnn_allows
        for name, part in _parts(torch):
            if name in by_part and part.fp32_precision != by_part[name]:
                part.fp32_precision = by_part[name]


def _parts(torch: Any) -> list[tuple[str, Any]]:
    if not hasattr(torch.backends, "fp32_precision"):
        return []
    return [(name, operator.attrgetter(name)(torch.backends) if name else torch.backends) for name in _PARTS]


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:  # the notebook has set the precision of a part
        return None


@contextmanager
def _quiet(torch: Any) -> Iterator[None]:
    """Ignore warnings on torch 2.9, which warns at the first use of the older functions."""
    if not torch.__version__.startswith("2.9."):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
