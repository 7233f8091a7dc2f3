"""Detection of MPI, Slurm or Kubeflow as the starter of this process, by the environment variables that they set."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from accel_nb.errors import ConfigError

_FIRST_PORT, _NUM_PORTS = 20_000, 12_000
_RANGE = re.compile(r"([0-9]+)(?:-[0-9]+)?")


@dataclass(frozen=True, slots=True)
class SchedulerPosition:
    """This process's position among those that a scheduler has started together.

    ``address`` is the first machine's name; None where the scheduler does not provide it. ``machine`` is the number of
    this process's machine among ``num_machines``.
    """

    scheduler: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str | None
    port: int
    machine: int
    num_machines: int

    @property
    def is_machine(self) -> bool:
        """Whether each machine has one such process, which starts the ranks there."""
        return self.size > 1 and self.num_machines == self.size

    @property
    def is_rank(self) -> bool:
        """Whether this process becomes a rank itself."""
        return self.size > 1 and not self.is_machine


def find_scheduler_position(variables: Mapping[str, str], parent: int) -> SchedulerPosition | None:
    """Return this process's position, or None if no scheduler has started several; ``parent`` is the parent's id.

    Raise ConfigError for variables that contradict each other.
    """
    try:
        for found in (_slurm(variables), _mpi(variables, parent), _kubeflow(variables)):
            if found is not None and found.size > 1:
                return found
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"a scheduler's variables are not valid ({error}); unset them, or start the job again"
        ) from None
    return None


def _slurm(variables: Mapping[str, str]) -> SchedulerPosition | None:
    """Return the position of a task of a job step; None for the batch script itself."""
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return None
    size = int(variables.get("SLURM_STEP_NUM_TASKS", variables.get("SLURM_NTASKS", "1")))
    nodes = variables.get(
        "SLURM_STEP_NODELIST", variables.get("SLURM_JOB_NODELIST", variables.get("SLURM_NODELIST", ""))
    )
    num_machines = int(variables.get("SLURM_STEP_NUM_NODES", "1"))
    machine = int(variables["SLURM_NODEID"]) if num_machines > 1 else 0
    local_sizes = _counts(variables["SLURM_STEP_TASKS_PER_NODE"]) if num_machines > 1 else [size]
    if not 0 <= machine < len(local_sizes):
        raise ValueError(f"SLURM_NODEID {machine} of {len(local_sizes)} machines")
    step = f"{variables.get('SLURM_JOB_ID', '0')}.{variables['SLURM_STEP_ID']}"
    return SchedulerPosition(
        "Slurm",
        int(variables["SLURM_PROCID"]),
        size,
        int(variables.get("SLURM_LOCALID", "0")),
        local_sizes[machine],
        variables.get("MASTER_ADDR") or first_host(nodes),
        int(variables["MASTER_PORT"]) if "MASTER_PORT" in variables else rendezvous_port(step),
        machine,
        num_machines,
    )


def _counts(text: str) -> list[int]:
    """Return the numbers of a list such as ``2(x3),1``, which stands for 2, 2, 2 and 1."""
    found: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        found += [int(count)] * int(times or 1)
    return found


def _mpi(variables: Mapping[str, str], parent: int) -> SchedulerPosition | None:
    """Return the position of a process of Open MPI, MPICH or a derivative of it."""
    names = [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ]
    for rank, size, local_rank, local_size in names:
        if rank not in variables or size not in variables:
            continue
        num = int(variables[size])
        num_local = int(variables.get(local_size, str(num)))
        address = "127.0.0.1" if num_local == num else variables.get("MASTER_ADDR")
        port = int(variables["MASTER_PORT"]) if "MASTER_PORT" in variables else rendezvous_port(f"mpi {parent}")
        own = int(variables[rank])
        # MPI does not number machines; by default it fills one after the other.
        return SchedulerPosition(
            "MPI", own, num, int(variables.get(local_rank, own)), num_local, address, port,
            own // num_local, -(-num // num_local),
        )  # fmt: skip
    return None


def _kubeflow(variables: Mapping[str, str]) -> SchedulerPosition | None:
    """Return the position of a pod of a TrainJob, which has the variables of torchrun."""
    if "PET_NNODES" not in variables or "PET_NODE_RANK" not in variables:
        return None
    address = variables.get("PET_MASTER_ADDR")
    rank, size = int(variables["PET_NODE_RANK"]), int(variables["PET_NNODES"])
    return SchedulerPosition(
        "Kubeflow", rank, size, 0, 1, address, int(variables.get("PET_MASTER_PORT", "29500")), rank, size
    )  # fmt: skip


def first_host(nodes: str) -> str | None:
    """Return the first name of a list such as ``gpu[07-09,12],login1``; None for an empty one."""
    if not nodes:
        return None
    head, bracket, rest = nodes.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    inner, _, tail = rest.partition("]")
    found = _RANGE.match(inner)
    if found is None:
        raise ValueError(f"node list {nodes[:100]!a}")
    return head + found[1] + tail.partition(",")[0]


def rendezvous_port(job: str) -> int:
    """Return a port that is the same for all processes of a job."""
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
