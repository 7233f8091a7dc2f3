"""How fast does a model compute whose weights are on disk, and how fast and small does it load?

A transformer of torch modules with random weights, in safetensors shards that the page cache holds. accel_nb computes
with the shards in place; accelerate makes its own copy of them while loading, as it does for every checkpoint. Forwards
alternate in a random order within one process, and those of a round are compared with each other, since the machine's
speed changes during a run. Before cold forwards the files are dropped from the page cache; accel_nb then reads through
the cache, or past it, which it chooses itself for a model larger than the cache. In the same rounds several threads
read the disk alone, without the cache: about the shortest time that a cold forward can take. Loading is measured in
separate processes: mapped files are compared with mapped files, copies with copies. A model of several GiB that
generates under a hard limit of memory is measured in a separate process too.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, Figure, Report, main, median_interval, shuffled_rounds
from tests.support.memory import peak_bytes

OURS, PEER, RESIDENT = "accel_nb", "accelerate", "all weights in memory"
PAST = "accel_nb, past the cache"
DISK = "the disk alone"
MAPPED = "accel_nb, files mapped"
COPIED = "accelerate, weights copied out of its files"
WIDTH, VOCABULARY, SHARDS = 1536, 4096, 4
_DISK = {"embedding": "cpu", "positions": "cpu", "head": "cpu", "norm": "cpu", "blocks": "disk"}
FEW, MANY = 1, 16
"""Tokens of a forward: one, as in text generation, and so many that accelerate computes about as long as it reads."""
_LIMIT_SHARE = 0.25
"""The limit of memory for generation, beyond the memory of torch itself, as a fraction of the model's size."""
_NEW_TOKENS = 4


def big_model(quick: bool = False) -> Report:
    """Measure forwards from disk and loading, and report the ratios."""
    depth, rounds, loads, large = (8, 3, 2, 16) if quick else (20, 15, 3, 48)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        nbytes = int(_run_child("--save", folder, depth))
        forwards = json.loads(_run_child("--forwards", folder, depth, rounds))
        for path in folder.glob("*.safetensors"):
            path.read_bytes()  # into the page cache again
        loading: dict[str, list[list[float]]] = {OURS: [], MAPPED: [], PEER: [], COPIED: []}
        for order in shuffled_rounds(list(loading), loads):
            for who in order:
                places = ("cpu",) if who in (COPIED, MAPPED) else ("cpu", "disk")
                loading[who].append(
                    [x for place in places for x in json.loads(_run_child("--load", folder, depth, who, place))]
                )
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        large_nbytes = int(_run_child("--save-empty", name, large))
        limited = json.loads(_run_child("--generate", name, large, int(large_nbytes * _LIMIT_SHARE)))
        free = json.loads(_run_child("--generate", name, large, 0))
    report = Report(
        "Models larger than memory",
        f"Forwards of a transformer of {nbytes / 2**30:.1f} GiB (float32, {depth} blocks), its blocks on disk, warm in "
        f"the page cache; {rounds} rounds. Loading to memory, or leaving on disk: {loads} processes each.",
        [
            "",
            f"{FEW} token, s",
            "CPU, s",
            f"{MANY} tokens, s",
            "CPU, s",
            "cold, s",
            "CPU, s",
            "load to memory, s",
            "peak, GiB",
            "load for disk, s",
            "peak, GiB",
        ],
    )
    loaded = {who: [statistics.median(column) for column in zip(*runs, strict=True)] for who, runs in loading.items()}
    keys = (str(FEW), str(MANY), "cold")
    walls = {key: {who: [wall for wall, _ in runs] for who, runs in forwards[key].items()} for key in keys}
    medians = {key: {who: statistics.median(runs) for who, runs in walls[key].items()} for key in keys}
    for who in (OURS, PAST, PEER, RESIDENT, DISK):
        cells = [
            cell
            for key in keys
            for cell in (map(statistics.median, zip(*forwards[key][who], strict=True)) if who in walls[key] else "  ")
        ]
        report.add(who, *(cell if isinstance(cell, float) else "" for cell in cells), *loaded.get(who, [""] * 4))
    for who in (MAPPED, COPIED):
        report.add(who, *[""] * 6, *loaded[who], "", "")
    for key, who, what, limit in (
        (str(FEW), OURS, "waiting for memory", 2.5),
        (str(MANY), OURS, "reading and computing in balance", 1.4),
        ("cold", PAST, "waiting for the disk, past the cache", 4.0),
        ("cold", OURS, "waiting for the disk, through the cache", 4.0),
    ):
        ratios = [theirs / ours for ours, theirs in zip(walls[key][who], walls[key][PEER], strict=True)]
        report.figures.append(
            Figure(f"forward, {what}: over accelerate", statistics.median(ratios), limit, "x", "at least",
                   median_interval(ratios))
        )  # fmt: skip
    reading = statistics.median(forwards["reading"])
    few, many, cold = (medians[key] for key in keys)
    of_disk = [peer / alone for peer, alone in zip(walls["cold"][PEER], walls["cold"][DISK], strict=True)]
    for what, bound, ours in (
        (f"{FEW} token(s)", max(reading, few[RESIDENT]), few[OURS]),
        (f"{MANY} token(s)", max(reading, many[RESIDENT]), many[OURS]),
        ("cold", max(cold[DISK], few[RESIDENT]), min(cold[OURS], cold[PAST])),
    ):
        report.figures.append(Figure(f"forward, {what}: over max(reading, computing)", ours / bound, 1.15, "x"))
    for what, who, peer, at in (
        ("to memory of its own", OURS, COPIED, 0),
        ("to memory, files mapped", MAPPED, PEER, 0),
        ("for disk", OURS, PEER, 2),
    ):
        report.figures.append(
            Figure(f"loading {what}: over accelerate", loaded[peer][at] / loaded[who][at], 1.2, "x", "at least")
        )
        report.figures.append(
            Figure(f"loading {what}: peak over accelerate's", loaded[who][at + 1] / loaded[peer][at + 1], 1.0, "x")
        )
    limit = large_nbytes * _LIMIT_SHARE
    report.figures.append(
        Figure(f"{large_nbytes / 2**30:.1f} GiB generate: peak over hard limit", limited["grown"] / limit, 1.0, "x")
    )
    assert limited["tokens"] == free["tokens"], "under a limit of memory other tokens were generated"
    report.notes.append(
        f"A transformer of {large_nbytes / 2**30:.1f} GiB generated {_NEW_TOKENS} tokens, the same as with no limit, "
        f"under an RLIMIT_DATA of {limit / 2**30:.2f} GiB beyond what torch had taken: its peak was "
        f"{limited['grown'] / 2**30:.2f} GiB, {limited['seconds']:.2f} s a token; all in memory {free['seconds']:.2f}."
    )
    report.notes.append(
        f"Copying all weights once from the cache in one thread took {reading:.2f} s. accel_nb copies none where this "
        "processor's kernels round alike wherever a tensor starts: it computes from the cache's own pages, which are "
        f"mapped for one block at a time: 1 token took {few[OURS] / few[RESIDENT]:.2f} x, {MANY} tokens "
        f"{many[OURS] / many[RESIDENT]:.2f} x as long as with all weights in memory."
    )
    low, high = median_interval(of_disk)
    report.notes.append(
        "Cold: the system has dropped the files from its cache; that of the host below a virtual machine is its own. "
        f"accelerate's cold forward took {statistics.median(of_disk):.2f} ({low:.2f} to {high:.2f}) x as long as the "
        "disk alone, read past the cache by 8 threads: about all there is to gain on this machine."
    )
    report.notes.append(
        "Loading to memory counts until a forward and sums have touched all weights. accelerate maps files, and "
        "computes from the page cache without a copy of its own: compared with ours under mmap=True. Such weights are "
        "valid as long as nobody writes to the files. By default ours are the process's own, as those in the row with "
        "copies are."
    )
    return report


def _run_child(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.big_model", *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()[-1]


def _make_empty(depth: int) -> Any:
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


def _save_empty(folder: Path, depth: int) -> None:
    """Write random weights without a model that holds them, one file a block."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    groups: dict[str, dict[str, Any]] = {}
    for name, tensor in _make_empty(depth).state_dict().items():
        if name != "head.weight":  # the embedding's
            groups.setdefault(".".join(name.split(".")[:2]), {})[name] = tensor
    weight_map: dict[str, str] = {}
    nbytes = 0
    for number, group in enumerate(groups.values()):
        file = f"model-{number:05d}.safetensors"
        values = {name: torch.randn(tensor.shape) * 0.02 for name, tensor in group.items()}
        save_file(values, folder / file)
        weight_map.update(dict.fromkeys(group, file))
        nbytes += sum(value.nbytes for value in values.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    print(nbytes)


def _generate(folder: Path, depth: int, limit: int) -> None:
    """Generate from weights on disk under a hard limit of memory, or from weights in memory without a limit."""
    import resource

    import torch

    model = _make_empty(depth)
    tokens = torch.arange(4)[None]
    torch.nn.functional.linear(torch.randn(64, 64), torch.randn(64, 64))  # torch starts its threads
    if limit:
        status = Path("/proc/self/status").read_text().splitlines()
        used = int(next(line for line in status if line.startswith("VmData")).split()[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + limit, used + limit))
        try:
            torch.ones(2 * limit, dtype=torch.uint8)
        except RuntimeError:
            pass
        else:
            raise RuntimeError("the limit does not hold")
    before = peak_bytes()
    model = _load(OURS, model, folder, {"": "disk" if limit else "cpu"})
    seconds: list[float] = []
    with torch.inference_mode():
        for _ in range(_NEW_TOKENS):
            started = time.perf_counter()
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
            seconds.append(time.perf_counter() - started)
    grown = peak_bytes() - before
    print(json.dumps({"tokens": tokens.tolist(), "grown": grown, "seconds": statistics.median(seconds)}))


def _load(who: str, model: Any, folder: Path, places: dict[str, Any]) -> Any:
    if who in (OURS, PAST, MAPPED):
        from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch

        loaded = load_checkpoint_and_dispatch(model, folder, places, mmap=who == MAPPED)
        for file in {piece.source.file for unit in _units(loaded) for piece in unit.weights} if who == PAST else ():
            file.bypass_cache()
        return loaded
    from accelerate import load_checkpoint_and_dispatch

    return load_checkpoint_and_dispatch(model, str(folder), places, offload_folder=tempfile.mkdtemp(dir=folder))


def _units(model: Any) -> list[Any]:
    from accel_nb.bigmodel.offload.dispatch import get_prefetcher

    stream = get_prefetcher(model)
    assert stream is not None
    return list(dict.fromkeys(stream._order))


def _forwards(folder: Path, depth: int, rounds: int) -> None:
    import torch

    from accel_nb.bigmodel.host_memory import empty_tensors

    models = {who: _load(who, _make_empty(depth), folder, _DISK) for who in (OURS, PEER)}
    models[RESIDENT] = _load(OURS, _make_empty(depth), folder, {"": "cpu"})
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for count in (FEW, MANY):
            tokens = torch.arange(count)[None] % VOCABULARY
            expected = models[RESIDENT](tokens)
            for model in models.values():  # the first two forwards warm up
                assert torch.equal(model(tokens), expected)
                model(tokens)
            times: dict[str, list[tuple[float, float]]] = {who: [] for who in models}
            for order in shuffled_rounds(list(models), rounds):
                for who in order:
                    times[who].append(_time_call(lambda who=who, tokens=tokens: models[who](tokens)))
            found[str(count)] = times
        tokens = torch.arange(FEW)[None] % VOCABULARY
        disk_only = {OURS: models[OURS], PAST: _load(PAST, _make_empty(depth), folder, _DISK), PEER: models[PEER]}
        runs: dict[str, Callable[[], object]] = {
            who: lambda model=model: model(tokens) for who, model in disk_only.items()
        }
        runs[DISK] = functools.partial(_read_past_cache, sorted(folder.glob("*.safetensors")))
        found["cold"] = {who: [] for who in runs}
        for order in shuffled_rounds(list(runs), max(3, rounds // 2)):
            for who in order:
                _drop_from_cache(folder)
                found["cold"][who].append(_time_call(runs[who]))
        units = _units(models[OURS])
        buffer = empty_tensors([((max(unit.nbytes for unit in units),), torch.uint8)])[0]

        def read_all() -> None:
            for unit in units:
                for piece in unit.weights:
                    view = buffer[piece.offset : piece.offset + piece.nbytes].view(piece.placeholder.dtype)
                    piece.source.read_into(view)

        read_all()
        found["reading"] = [_time_call(read_all)[0] for _ in range(rounds)]
    print(json.dumps(found))


def _drop_from_cache(folder: Path) -> None:
    """Write all files of a folder to disk, and drop them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _read_past_cache(paths: list[Path]) -> None:
    """Read files as fast as the disk allows: in whole sectors, without the page cache."""
    size = 4 << 20
    fds = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
    places = [(fd, at) for fd, path in zip(fds, paths, strict=True) for at in range(0, path.stat().st_size, size)]
    own = threading.local()

    def read(place: tuple[int, int]) -> None:
        if not hasattr(own, "memory"):
            own.memory = mmap.mmap(-1, size)
        os.preadv(place[0], [own.memory], place[1])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, places))
    for fd in fds:
        os.close(fd)


def _time_call(run: Callable[[], object]) -> tuple[float, float]:
    """Return wall time and processor time of a call in seconds; other load changes processor time less."""
    started, worked = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - started, time.process_time() - worked


def _load_timed(folder: Path, depth: int, who: str, place: str) -> None:
    import torch

    import accel_nb.bigmodel.loading.load  # noqa: F401

    if who in (PEER, COPIED):
        import accelerate  # noqa: F401
    torch.ones(1)
    tokens = torch.zeros(1, 1, dtype=torch.long)
    empty = _make_empty(depth)

    def run() -> None:
        model = _load(who, empty, folder, {"": place} if place == "cpu" else _DISK)
        if who == COPIED:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        if place == "cpu":
            with torch.inference_mode():
                model(tokens)
                for parameter in model.parameters():  # also weights of which a forward reads few rows
                    parameter.sum()

    before = peak_bytes()
    seconds, _ = _time_call(run)
    print(json.dumps([seconds, (peak_bytes() - before) / 2**30]))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1:2] == ["--save"]:
        _save(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["--save-empty"]:
        _save_empty(Path(sys.argv[2]), int(sys.argv[3]))
    elif sys.argv[1:2] == ["--generate"]:
        _generate(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["--forwards"]:
        _forwards(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["--load"]:
        _load_timed(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        main(big_model)
