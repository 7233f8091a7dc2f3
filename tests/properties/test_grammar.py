"""The grammar makes the same program of a number each time and reaches every option; verdicts see what differs."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from tests.properties.encoders import ENCODERS
from tests.properties.interfaces import INTERFACES
from tests.properties.loops import ITERATIONS, PLACES
from tests.properties.losses import LOSSES, REGULARISERS
from tests.properties.program import Program, make_program
from tests.properties.run import shrink
from tests.properties.verdict import Runner, Verdict, printed_values, run_plain
from tests.properties.workers import Workers
from tests.realworld.values import Entries
from tests.support.kernel import Output

PROGRAM = make_program(3, {"loss": "mse", "printing": "each loss"})
RECEIPT = "2 workers on cpu, 1 thread each · ddp · precision no · prepared model Net (66 parameters)"
OF_SHARE = f"{RECEIPT} · a printed loss or count is rank 0's share"
WARNING = "cell.py:3: UserWarning: this loss is not proven: each worker computes it from its own share\n"
NOISE = "cell.py:3: UserWarning: random numbers are drawn for each batch: each worker draws its own\n"


class FakeWorkers:
    """Workers that end as they are told."""

    size = 2

    def __init__(self, output: Output, values: list[Entries]) -> None:
        self._outcome = output, values
        self.num_starts = 0

    def start(self, size: int) -> None:
        self.num_starts += 1

    def run(self, source: str, names: tuple[str, ...]) -> tuple[Output, list[Entries]]:
        return self._outcome


def judged(
    *, receipt: str = RECEIPT, stderr: str = "", change: float = 0.0, of: str = "model", rank: int = 0, **ends: object
) -> tuple[Verdict, int]:
    plain = run_plain(PROGRAM)
    values: list[Entries] = [dict(plain.values), dict(plain.values)]
    for path, entry in plain.values.items():
        if path.startswith(of) and isinstance(entry, list) and "(shape)" not in path:
            values[rank][path] = [number + change for number in entry]
    stdout = plain.outputs[0].stdout.replace(".", ".1" if of == "printed" and change else ".")
    output = Output(stdout=stdout, stderr=stderr, displays=[{"text/plain": receipt}], **ends)  # type: ignore[arg-type]
    workers = FakeWorkers(output, values)
    return Runner(cast(Workers, workers)).judge(PROGRAM, 2), workers.num_starts


@pytest.mark.parametrize(
    ("ends", "kind"),
    [
        ({}, "equal"),
        ({"stderr": WARNING}, "equal"),
        ({"change": 1e-12}, "equal"),
        ({"change": 1e-7}, "silent"),
        ({"change": 1e-7, "rank": 1}, "silent"),
        ({"change": 1.0, "of": "printed"}, "silent"),
        ({"change": 1.0, "of": "printed", "receipt": OF_SHARE}, "told"),
        ({"change": 1.0, "receipt": OF_SHARE}, "silent"),
        ({"change": 1.0, "stderr": WARNING}, "told"),
        ({"change": 1.0, "stderr": NOISE}, "silent"),
        ({"error": ("RuntimeError", "shapes"), "traceback": "RuntimeError: shapes"}, "failed"),
        ({"error": ("MisuseError", "no"), "traceback": "MisuseError: no"}, "refused"),
    ],
)
def test_kind_of_an_outcome(ends: dict[str, object], kind: str) -> None:
    verdict, num_starts = judged(**ends)  # type: ignore[arg-type]
    assert verdict.kind == kind
    assert num_starts == (1 if kind in ("silent", "failed") else 0), "bad outcomes are repeated on fresh workers"


def test_a_number_makes_one_program() -> None:
    assert all(make_program(number) == make_program(number) for number in range(20))
    assert len({make_program(number).source for number in range(200)}) == 200


def test_a_forced_choice_leaves_the_others() -> None:
    for number in range(50):
        program = make_program(number)
        changed = make_program(number, {"clip": "value"})
        assert changed.choices == {**program.choices, "clip": "value"}


def test_every_option_is_reached() -> None:
    made = [make_program(number).choices for number in range(3000)]
    assert {choices["loss"] for choices in made if "loss" in choices} == set(LOSSES)
    assert {choices["interface"] for choices in made} == set(INTERFACES)
    assert {choices["regulariser"] for choices in made} == set(REGULARISERS)
    assert {choices["iteration"] for choices in made} == set(ITERATIONS)
    assert {choices["place"] for choices in made} == set(PLACES)
    encoders = {(choices["inputs"], choices["encoder"]) for choices in made}
    assert encoders == {(inputs, name) for inputs, found in ENCODERS.items() for name in found}


def test_a_plain_run_changes_nothing_here() -> None:
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    run = run_plain(PROGRAM)
    assert run.failed is None
    assert torch.get_default_dtype() == dtype
    assert torch.equal(torch.get_rng_state(), state)
    assert run_plain(PROGRAM).values == run.values


def test_numbers_are_read_from_what_is_printed() -> None:
    found = printed_values("0 1.5\nscore: -2e-05 of x1, nan\n")
    assert found["printed text"] == "# #\nscore: # of x1, #\n"
    numbers = cast(list[float], found["printed"])
    assert numbers[:3] == [0.0, 1.5, -2e-05]
    assert len(numbers) == 4


def test_a_bad_program_is_reduced_to_the_choice_that_matters() -> None:
    class Fake:
        def judge(self, program: Program, workers: int) -> Verdict:
            is_bad = program.choices["encoder"] == "batch norm"
            return Verdict(program, workers, "silent" if is_bad else "equal")

    forced = {"inputs": "vectors", "encoder": "batch norm", "clip": "norm"}
    number = next(n for n in range(99) if len(make_program(n, forced).unusual) > 6)
    program = make_program(number, forced)
    runner = cast(Runner, Fake())
    found = shrink(runner, runner.judge(program, 2), {"encoder": "batch norm"}).program
    assert found.unusual == {"encoder": "batch norm"}
