"""A model in stages on several ranks computes what it computes whole."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from accel_nb.bigmodel.pipelining.pipeline import prepare_pipeline
from accel_nb.errors import ConfigError
from accel_nb.runtime.distributed.pipeline_stages import why_no_stages
from accel_nb.runtime.world import World
from tests.ranks.launch import RankError, run_ranks
from tests.support.nightly import nightly
from tests.support.transformer import Transformer

TOKENS = torch.arange(96).reshape(8, 12) % 64


def transformer(tied: bool) -> Transformer:
    torch.manual_seed(0)
    return Transformer(depth=6, tied=tied).eval()


def in_stages(world: World, tied: bool, points: Any, num_chunks: int | None, gathers: bool) -> Any:
    resident = transformer(tied)
    model = prepare_pipeline(
        transformer(tied), points, example_args=(TOKENS,), num_chunks=num_chunks, gather_output=gathers
    )
    rows = -(-len(TOKENS) // (num_chunks or world.size))
    found: list[Any] = []
    for size in (8, 5, 19):
        batch = torch.cat([TOKENS, TOKENS.flip(0), TOKENS])[:size]
        output = model(batch) if world.rank == 0 else model()
        if output is None:
            found.append(None)
            continue
        with torch.no_grad():
            filled = torch.cat([batch, batch[-1:].expand(-size % rows, -1)])
            expected = torch.cat([resident(part) for part in filled.split(rows)])[:size]
            whole = resident(batch)
        found.append((torch.equal(output, expected), torch.allclose(output, whole, atol=1e-5)))
    own = {name.rpartition(".")[0] for name, _ in model.forward.stages.module.named_parameters()}
    return found, sum(f"blocks.{at}.up" in own for at in range(6))


@pytest.mark.parametrize(
    ("size", "tied", "points", "num_chunks", "gathers"),
    [
        (2, False, "auto", None, False),
        (2, True, "auto", 4, True),
        nightly(3, False, ["blocks.1", "blocks.4"], 2, False),
    ],
)
def test_outputs_equal_those_of_the_whole_model(
    size: int, tied: bool, points: Any, num_chunks: Any, gathers: bool
) -> None:
    problem = why_no_stages(size, num_chunks or size, "gloo")
    if problem is not None:
        with pytest.raises(RankError, match=f"MisuseError: {re.escape(problem)}"):
            run_ranks(in_stages, size, tied, points, num_chunks, gathers)
        pytest.skip(problem)
    results = run_ranks(in_stages, size, tied, points, num_chunks, gathers, timeout_s=110)
    for rank, (found, _) in enumerate(results):
        has_output = gathers or rank == size - 1
        assert found == [(True, True) if has_output else None] * 3
    blocks = [num_blocks for _, num_blocks in results]
    assert blocks == ([1, 3, 2] if size == 3 else [3, 3]), "each rank holds its own stage only"


def refused(world: World) -> list[str]:
    reported: list[str] = []
    wrong: list[dict[str, Any]] = [
        {"split_points": ["blocks.1", "tail"], "example_args": (TOKENS,)},
        {"num_chunks": 0, "example_args": (TOKENS,)},
        {},
    ]
    for options in wrong:
        try:
            prepare_pipeline(transformer(False), **options)
        except ConfigError as error:
            reported.append(str(error))
    return reported


def test_wrong_uses_are_refused_on_every_rank() -> None:
    for reported in run_ranks(refused, 2):
        assert len(reported) == 3
        assert "'tail', which is not a module" in reported[0]
        assert "2 ranks need 1" in reported[0]
        assert "num_chunks is 0" in reported[1]
        assert "have no tensor" in reported[2]


def test_alone_the_model_stays_as_it_is() -> None:
    model = transformer(True)
    assert prepare_pipeline(model, example_args=(TOKENS,)) is model
    assert "forward" not in model.__dict__
