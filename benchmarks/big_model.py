"""How fast does a model compute whose weights are on disk, and how fast and small does it load?

A transformer of torch modules with random weights, in safetensors shards that the page cache holds. accel_nb reads the
shards in place; accelerate makes its own copy of them while loading, as it does for every checkpoint. Forwards
alternate in a random order within one process. Loading is measured in processes of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Figure, Report, main, median_interval, shuffled_rounds

OURS, PEER, RESIDENT = "accel_nb", "accelerate", "all weights in memory"
WIDTH, VOCABULARY, SHARDS = 1536, 4096, 4
_DISK = {"embedding": "cpu", "positions": "cpu", "head": "cpu", "norm": "cpu", "blocks": "disk"}
FEW, MANY = 1, 16
"""Tokens of a forward: one, as when text is generated, and as many as take the peer about as long as its reading."""


def big_model(quick: bool = False) -> Report:
    """Measure forwards from disk and loading, and report the ratios."""
    depth, rounds, loads = (8, 3, 2) if quick else (20, 9, 3)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        nbytes = int(_child("--save", folder, depth))
        forwards = json.loads(_child("--forwards", folder, depth, rounds))
        loading: dict[str, list[list[float]]] = {OURS: [], PEER: []}
        places = ("cpu", "disk")
        for order in shuffled_rounds([OURS, PEER], loads):
            for who in order:
                loading[who].append(
                    [x for place in places for x in json.loads(_child("--load", folder, depth, who, place))]
                )
    report = Report(
        "Models larger than memory",
        f"Forwards of a transformer of {nbytes / 2**30:.1f} GiB (float32, {depth} blocks), its blocks on disk, warm in "
        f"the page cache; {rounds} rounds. Loading to memory, or leaving on disk: {loads} processes each.",
        [
            "",
            f"{FEW} token, s",
            f"{MANY} tokens, s",
            "load to memory, s",
            "peak, GiB",
            "load for disk, s",
            "peak, GiB",
        ],
    )
    loaded = {who: [statistics.median(run[at] for run in runs) for at in range(4)] for who, runs in loading.items()}
    for who in (OURS, PEER):
        few, many = (statistics.median(forwards[str(count)][who]) for count in (FEW, MANY))
        report.add(who, few, many, *loaded[who])
    report.add(RESIDENT, *(statistics.median(forwards[str(count)][RESIDENT]) for count in (FEW, MANY)), "", "", "", "")
    for count, what, limit in ((FEW, "waiting for memory", 2.5), (MANY, "reading and computing in balance", 1.4)):
        ratios = [
            theirs / ours for ours, theirs in zip(forwards[str(count)][OURS], forwards[str(count)][PEER], strict=True)
        ]
        report.figures.append(
            Figure(f"forward, {what}: over accelerate", statistics.median(ratios), limit, "x", "at least",
                   median_interval(ratios))
        )  # fmt: skip
    reading = statistics.median(forwards["reading"])
    for count in (FEW, MANY):
        bound = max(reading, statistics.median(forwards[str(count)][RESIDENT]))
        ours = statistics.median(forwards[str(count)][OURS])
        report.figures.append(
            Figure(f"forward, {count} token(s): over max(reading, computing)", ours / bound, 1.15, "x")
        )
    for at, what in ((0, "to memory"), (2, "for disk")):
        report.figures.append(
            Figure(f"loading {what}: over accelerate", loaded[PEER][at] / loaded[OURS][at], 1.2, "x", "at least")
        )
        report.figures.append(
            Figure(f"loading {what}: peak over accelerate's", loaded[OURS][at + 1] / loaded[PEER][at + 1], 1.0, "x")
        )
    report.notes.append(f"Reading all weights once into buffers that are used again took {reading:.2f} s.")
    report.notes.append("Loading to memory counts until one forward has touched all weights: accelerate maps files.")
    return report


def _child(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.big_model", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()[-1]


def _empty(depth: int) -> Any:
    from accel_nb.bigmodel.meta import init_empty_weights
    from tests.support.transformer import Transformer

    with init_empty_weights():
        return Transformer(VOCABULARY, WIDTH, depth, length=128)


def _save(folder: Path, depth: int) -> None:
    import torch

    from tests.support.checkpoints import save_sharded
    from tests.support.transformer import Transformer

    torch.manual_seed(0)
    model = Transformer(VOCABULARY, WIDTH, depth, length=128)
    save_sharded(model, folder, SHARDS)
    print(sum(parameter.nbytes for parameter in model.parameters()))


def _load(who: str, model: Any, folder: Path, places: dict[str, Any]) -> Any:
    if who == OURS:
        from accel_nb.bigmodel.load import load_checkpoint_and_dispatch

        return load_checkpoint_and_dispatch(model, folder, places)
    from accelerate import load_checkpoint_and_dispatch

    return load_checkpoint_and_dispatch(model, str(folder), places, offload_folder=tempfile.mkdtemp(dir=folder))


def _forwards(folder: Path, depth: int, rounds: int) -> None:
    import torch

    from accel_nb.bigmodel.offload import stream_of

    ways = {
        OURS: _load(OURS, _empty(depth), folder, _DISK),
        PEER: _load(PEER, _empty(depth), folder, _DISK),
        RESIDENT: _load(OURS, _empty(depth), folder, {"": "cpu"}),
    }
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for count in (FEW, MANY):
            tokens = torch.arange(count)[None] % VOCABULARY
            expected = ways[RESIDENT](tokens)
            for model in ways.values():  # everybody's second forward is like all others
                assert torch.equal(model(tokens), expected)
                model(tokens)
            times: dict[str, list[float]] = {who: [] for who in ways}
            for order in shuffled_rounds(list(ways), rounds):
                for who in order:
                    times[who].append(_timed(lambda who=who, tokens=tokens: ways[who](tokens)))
            found[str(count)] = times
        stream = stream_of(ways[OURS])
        assert stream is not None
        units = list(dict.fromkeys(stream._order))
        buffer = stream._lane.allocate(max(unit.nbytes for unit in units))

        def read_all() -> None:
            for unit in units:
                for piece in unit.pieces:
                    view = buffer[piece.begin : piece.begin + piece.nbytes].view(piece.empty.dtype)
                    piece.source.read_into(view)

        read_all()
        found["reading"] = [_timed(read_all) for _ in range(rounds)]
    print(json.dumps(found))


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _load_timed(folder: Path, depth: int, who: str, place: str) -> None:
    import resource

    import torch

    import accel_nb.bigmodel.load  # noqa: F401

    if who == PEER:
        import accelerate  # noqa: F401
    torch.ones(1)
    tokens = torch.zeros(1, 1, dtype=torch.long)
    empty = _empty(depth)

    def run() -> None:
        model = _load(who, empty, folder, {"": place} if place == "cpu" else _DISK)
        if place == "cpu":
            with torch.inference_mode():
                model(tokens)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = _timed(run)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([seconds, grown / 2**20]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--save"]:
        _save(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["--forwards"]:
        _forwards(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["--load"]:
        _load_timed(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main(big_model)
