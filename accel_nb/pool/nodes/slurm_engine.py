"""Workers on the nodes of a Slurm job."""

from __future__ import annotations

import shlex
import subprocess

from accel_nb.config.engine_section import EngineOptions
from accel_nb.errors import ConfigError
from accel_nb.pool.engine import EngineRequest
from accel_nb.pool.nodes.agent_engine import START_TIMEOUT_S, Machine, resolve_address, run_command, start_agents
from accel_nb.pool.nodes.engine import NodesEngine
from accel_nb.runtime.process.environment import get_variables

_JOB_VARIABLES = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST")


def start_slurm_engine(request: EngineRequest) -> NodesEngine:
    """Start an agent by srun on each node: of the job that this process runs in, else of a job of its own.

    Raise ConfigError, with the remedy, if that is not possible, and PoolError if an agent does not start. Nothing is
    left running then.
    """
    options = request.options
    variables = get_variables(*_JOB_VARIABLES)
    allocation = None if len(variables) == len(_JOB_VARIABLES) else _Allocation(options)
    try:
        if allocation is None:
            job, node_list = variables["SLURM_JOB_ID"], variables["SLURM_JOB_NODELIST"]
        else:
            job, node_list = allocation.job, allocation.nodes
        names = run_command(["scontrol", "show", "hostnames", node_list]).split()
        if len(names) < options.nodes:
            raise ConfigError(
                f"--nodes {options.nodes} was requested, and Slurm's job {job} has {len(names)} ({', '.join(names)}); "
                "ask for fewer, or start the notebook in a larger job"
            )
        machines = [Machine(name, _address_in_slurm(name), _srun_command(job, name)) for name in names[: options.nodes]]
        return start_agents(request, machines, lambda: None if allocation is None else allocation.release())
    except BaseException:
        if allocation is not None:
            allocation.release()
        raise


class _Allocation:
    """A Slurm job of this process: it ends with `release`, or with this process, which closes the input of ``cat``."""

    def __init__(self, options: EngineOptions) -> None:
        allocation_flags = shlex.split(options.allocation or "--exclusive")
        command = ["salloc", f"--nodes={options.nodes}", "--ntasks-per-node=1", *allocation_flags]
        try:
            self._process = subprocess.Popen(
                [*command, "sh", "-c", 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat'],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise ConfigError(
                "--engine slurm needs Slurm's commands (salloc, srun), which are not installed here"
            ) from None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.job = self.nodes = ""
        try:
            words = self._process.stdout.readline().split()
            if len(words) != 2:
                errors = [line for line in self._process.stderr.read().splitlines() if "error" in line]
                raise ConfigError(
                    f"Slurm granted no job by `{shlex.join(command)}`: "
                    f"{errors[-1] if errors else 'it reported no error'}; "
                    'options such as the partition are given with --engine.allocation="--partition=gpu --time=2:00:00"'
                )
            self.job, self.nodes = words
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """End the job, or the wait for one."""
        if not self.job:
            self._process.terminate()
        try:
            self._process.communicate(timeout=START_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def _srun_command(job: str, node: str) -> tuple[str, ...]:
    return (
        "srun", f"--jobid={job}", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap", "--unbuffered",
        "--cpu-bind=none", "--mem=0",
    )  # fmt: skip


def _address_in_slurm(node: str) -> str:
    """Return the address that Slurm has for a node."""
    facts = run_command(["scontrol", "show", "node", "-o", node]).split()
    address = next((word.removeprefix("NodeAddr=") for word in facts if word.startswith("NodeAddr=")), node)
    return resolve_address(address, f"Slurm's node {node}")
