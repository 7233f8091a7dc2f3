"""Whether a model's blocks are a chain, as checked with random numbers in place of their outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accel_nb.errors import MisuseError
from accel_nb.strategies.pipeline.chain_probe import ChainProbe, check_chain

CPU = torch.device("cpu")


def blocks(probe: ChainProbe) -> list[Tensor]:
    hidden, found = torch.ones(2, 8), []
    for number in range(2):
        hidden = probe.call(number, None, (hidden,), {})
        found.append(hidden)
    return found


def test_an_output_that_is_nan_for_random_numbers_is_no_problem() -> None:
    output = check_chain("Net", 2, CPU, lambda probe: torch.log(blocks(probe)[1]))
    assert output.isnan().any()
    assert not output.isnan().all()


def test_an_output_that_uses_an_inner_block_is_refused() -> None:
    def run(probe: ChainProbe) -> Any:
        first, last = blocks(probe)
        return last + first

    with pytest.raises(MisuseError, match="more than the next block uses the output of a block"):
        check_chain("Net", 2, CPU, run)


def test_a_number_that_is_read_from_an_output_is_refused() -> None:
    with pytest.raises(MisuseError, match="Net returns a int, which stages do not exchange"):
        check_chain("Net", 2, CPU, lambda probe: (output := blocks(probe)[1], int((output > 0).sum())))
