"""Cells on machines that are named; here the only one is this machine, which needs no ssh."""

from __future__ import annotations

from tests.notebook.test_cells import done, run

FLAGS = "--engine ssh --engine.hosts localhost --cpus 2"


def test_a_cell_runs_by_an_agent(kernel) -> None:
    assert kernel.run("start = 3").error is None
    output = done(kernel, "import torch.distributed as dist\nsize = dist.get_world_size()\nfound = start + 1", FLAGS)
    assert "2 workers" in output.receipt
    assert kernel.value("(size, found)") == (2, 4)
    assert "on localhost" in kernel.run("%accelerate status").stdout


def test_machines_that_cannot_be_used_are_named(kernel) -> None:
    for flags, message in (
        ("--engine ssh --cpus 1", "the machines are not named; give them with --engine.hosts HOST,HOST"),
        ("--engine ssh --engine.hosts=-x --cpus 1", "names or addresses of hosts, separated by commas"),
        (f"{FLAGS} --nodes 2", "--nodes 2 was asked for, and engine.hosts names 1"),
        (f"{FLAGS} --engine.python /absent", "localhost has no /absent (no such file); name its Python"),
        (f"{FLAGS} --engine.python /bin/false", "localhost cannot start a host: exit status 1"),
        ("--nodes 2 --cpus 1", "the local engine runs on this machine only"),
    ):
        output = run(kernel, "1", flags)
        assert output.error is not None, flags
        assert message in output.error[1], output.error[1]
