"""Cells on machines that are named; here the only one is this machine, which needs no ssh."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, run

FLAGS = "--engine ssh --engine.hosts localhost --cpus 2"


@pytest.mark.nightly
def test_a_cell_runs_by_an_agent(kernel) -> None:
    assert kernel.run("start = 3").error is None
    output = done(kernel, "import torch.distributed as dist\nsize = dist.get_world_size()\nfound = start + 1", FLAGS)
    assert "2 workers" in output.receipt
    assert kernel.value("(size, found)") == (2, 4)
    assert "on localhost" in kernel.run("%accelerate status").stdout


@pytest.mark.nightly
def test_later_cells_run_on_the_machines_that_are_connected(kernel) -> None:
    assert kernel.run("%accelerate connect local").error is None
    assert "cells run on this machine" in kernel.run("%accelerate nodes").stdout
    connected = kernel.run("%accelerate connect localhost,localhost")
    assert connected.error is None, connected.traceback
    header, first, second = connected.stdout.strip().splitlines()
    assert header.split() == ["node", "name", "cores", "memory", "free", "GPUs", "ranks"]
    assert (first.split()[:2], second.split()[:2]) == (["0", "localhost"], ["1", "localhost-2"])
    assert " GiB " in first

    source = "import torch.distributed as dist\nsize = dist.get_world_size()"
    assert "2 workers" in done(kernel, source, "--cpus 1").receipt
    assert kernel.value("size") == 2
    assert [line.split()[-1] for line in kernel.run("%accelerate nodes").stdout.splitlines()] == ["ranks", "0", "1"]
    doctor = kernel.run("%accelerate doctor").stdout
    assert "[  ok] node localhost-2: memory: " in doctor

    for words, message in (
        ("connect", "%accelerate connect takes machines that ssh reaches"),
        ("connect nowhere.invalid", "nowhere.invalid of engine.hosts has no address"),
        ("connect localhost,localhost --gpus 1", "localhost is named several times, and its GPUs belong to one node"),
        ("nodes all", "%accelerate nodes takes no arguments"),
    ):
        output = kernel.run(f"%accelerate {words}")
        assert output.error is not None, words
        assert message in output.error[1], output.error[1]

    # A connection that fails leaves the options as they were.
    assert "2 workers" in done(kernel, source, "--cpus 1").receipt
    assert kernel.run("%accelerate connect local").error is None
    assert "1 worker" in done(kernel, source, "--cpus 1").receipt


def test_machines_that_cannot_be_used_are_named(kernel) -> None:
    for flags, message in (
        ("--engine ssh --cpus 1", "the machines are not named; give them with --engine.hosts HOST,HOST"),
        ("--engine kubernetes --cpus 1", "the machines are not named; give them with --engine.hosts HOST,HOST"),
        ("--engine ssh --engine.hosts=-x --cpus 1", "names or addresses of hosts, separated by commas"),
        (f"{FLAGS} --nodes 2", "--nodes 2 was requested, and engine.hosts names 1"),
        (f"{FLAGS} --engine.python /absent", "localhost has no /absent (no such file); name its Python"),
        (f"{FLAGS} --engine.python /bin/false", "accel_nb could not be started on localhost: exit status 1"),
        ("--nodes 2 --cpus 1", "the local engine runs on this machine only"),
    ):
        output = run(kernel, "1", flags)
        assert output.error is not None, flags
        assert message in output.error[1], output.error[1]
