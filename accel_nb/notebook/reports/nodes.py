"""The table of ``%accelerate nodes``, and the findings of ``%accelerate doctor`` about other machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accel_nb.notebook.reports.doctor import GIB, Finding, inspect_devices
from accel_nb.pool.engine import EngineFacts, WorkerSpec, ranks_of_node

NO_NODES = (
    "cells run on this machine. `%accelerate connect HOST,HOST` uses machines that ssh reaches, `%accelerate connect "
    "slurm` the nodes of a Slurm job, and `%accelerate connect HOST:PORT` a Ray cluster"
)


def describe_nodes(facts: EngineFacts | None, specs: Sequence[WorkerSpec]) -> str:
    """Return one line for each node: its name, cores, memory and GPUs, and the ranks of the workers on it."""
    if facts is None or not facts.nodes:
        return NO_NODES
    rows = [("node", "name", "cores", "memory free", "GPUs", "ranks")]
    for number, name in enumerate(facts.nodes):
        machine = facts.machines.get(number)
        ranks = ", ".join(map(str, ranks_of_node(specs, number))) or "none"
        if reason := facts.lost_nodes.get(number):
            rows.append((str(number), name, "", "", "", f"lost: {reason.partition(' was lost: ')[2] or reason}"))
        elif machine is None:
            rows.append((str(number), name, "?", "?", "?", ranks))
        else:
            memory = f"{machine.free_bytes / GIB:.1f} of {machine.total_bytes / GIB:.1f} GiB"
            names = {gpu.name for gpu in machine.gpus}
            gpus = f"{len(machine.gpus)} ({', '.join(sorted(names))})" if names else "none"
            rows.append((str(number), name, str(machine.num_cores), memory, gpus, ranks))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def diagnose_nodes(facts: EngineFacts | None) -> Iterator[Finding]:
    """Yield findings about the nodes that cells run on, each with the name of its node."""
    if facts is None:
        return
    for number, name in enumerate(facts.nodes):
        if reason := facts.lost_nodes.get(number):
            yield Finding("warning", f"{reason}; `%accelerate restart` connects to it again")
        elif (machine := facts.machines.get(number)) is not None:
            for finding in inspect_devices(machine):
                yield Finding(finding.level, f"node {name}: {finding.text}")
