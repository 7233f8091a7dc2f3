"""Conversion of a request into a job: the processes to start on this machine, and the text of a dry run."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from accel_nb.config import Config, Resolved, environment_layer, flags_to_line, resolve
from accel_nb.errors import ConfigError
from accel_nb.launch.kubeflow import train_job
from accel_nb.launch.local_job import JobResult, LocalJob
from accel_nb.launch.multi_node import agent_command, agent_variables, run_agent
from accel_nb.launch.rank_task import PROGRAM, RankTask, layers_to_send
from accel_nb.launch.request import LaunchRequest, Machines
from accel_nb.launch.scheduler import SchedulerPosition, find_scheduler_position
from accel_nb.launch.slurm import BatchFile, make_batch
from accel_nb.notebook.reports.plan import describe_plan
from accel_nb.pool.device_assignment import assign_devices
from accel_nb.pool.engine import WorkerSpec
from accel_nb.runs import RunRecording, RunRegistry
from accel_nb.runs.notification import RunEnd, notify
from accel_nb.runs.record import Outcome, read_run
from accel_nb.runtime.process.environment import CPU_RANK, all_variables, option_variables, rank_variables
from accel_nb.runtime.process.loopback import find_loopback
from accel_nb.runtime.world import World

_WITHOUT_EFFECT = {
    "bring_back": "a script has no notebook to bring names back to",
    "pull": "a script has no notebook to bring names back to",
    "prepare": "a script prepares its objects itself",
    "panel": "a script has no cell to show a panel below",
    "static": "a script has no cell to show a panel below",
    "background": "a script has no notebook that could continue meanwhile",
    "ranks": "a script runs on every rank",
    "max_restarts": "restarts of a script are set by the launch: --max-restarts N",
}


_LAUNCHER_OPTIONS = ("timeout", "show_ranks", "notify.url", "notify.command", "notify.after")
"""The options that the process that starts the ranks applies."""


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """A launch that is ready to start."""

    request: LaunchRequest
    resolved: Resolved
    specs: tuple[WorkerSpec, ...]
    machines: Machines
    scheduler: SchedulerPosition | None

    @classmethod
    def from_request(cls, request: LaunchRequest, variables: Mapping[str, str] | None = None) -> LaunchJob:
        """Resolve a request on this machine; raise ConfigError. ``variables`` are those of a scheduler, if any."""
        resolved = resolve([environment_layer(option_variables()), *request.layers])
        config = resolved.config
        if config.engine.kind != "local":
            raise ConfigError(
                f"engine.kind {config.engine.kind} from {resolved.origins['engine.kind']}: engines run the cells of a "
                "live notebook; for a job on several machines, give --nnodes, or start it under Slurm"
            )
        position = (
            None
            if _is_submitted_later(request)
            else find_scheduler_position(variables or all_variables(), os.getppid())
        )
        if request.target.kind == "notebook" and position is not None:
            raise ConfigError(
                f"{position.scheduler} has started {position.size} processes, and a notebook needs one, which starts "
                "workers itself; start one, or convert it to a script with accel-nb export"
            )
        if request.target.kind == "notebook" and config.ranks is not None:
            resolved.check_ranks(max(config.ranks) + 1)
        specs = () if _is_submitted_later(request) else _assign_workers(request, resolved, position)
        machines = request.machines
        if position is not None:
            _check_machines(position, machines)
        if position is not None and position.is_machine:
            machines = _find_machines(position, request)
        return cls(request, resolved, specs, machines, position)

    @property
    def name(self) -> str:
        """The name of the run: the given one, or the target's."""
        target = self.request.target
        words = target.args if target.name == PROGRAM else self._target_words()
        return self.resolved.config.name or (words[1] if words[0] == "-m" else Path(words[0]).stem)

    @property
    def notes(self) -> list[str]:
        """One line for each given option that has no effect, and for each value of accelerate's file that has none."""
        imported, given = self.request.imported, self.resolved.given
        if self.scheduler is not None and self.scheduler.rank > 0:
            return []  # the first process has them
        lines = [*(() if imported is None else imported.notes), *self.resolved.notes]
        if self.request.emit is not None:
            lines += [
                f"{name} from {origin} is not in the manifest: give it as a flag"
                for name, origin in self.resolved.origins.items()
                if origin.layer == "environment"
            ]
        if self.scheduler is not None and self.scheduler.is_rank:
            unused = [f"{name} from {self.resolved.origins[name]}" for name in _LAUNCHER_OPTIONS if name in given]
            unused += ["--max-restarts"] if self.request.max_restarts else []
            lines += [f"{name} has no effect: {self.scheduler.scheduler} starts and ends the ranks" for name in unused]
        elif not self.machines.is_single_machine and "show_ranks" in given:
            lines.append(f"show_ranks from {self.resolved.origins['show_ranks']} has no effect: all ranks are shown")
        if self.request.target.kind != "notebook":
            lines += [
                f"{name} from {self.resolved.origins[name]} has no effect: {_WITHOUT_EFFECT[name]}"
                for name in self.resolved.given
                if name in _WITHOUT_EFFECT
            ]
        return lines

    def task(self, folder: Path | None = None) -> RankTask:
        """Return the task for each rank."""
        target = self.request.target
        out = None if self.request.out is None else os.path.abspath(self.request.out)
        return RankTask(
            target.kind,
            target.name,
            layers_to_send(self.resolved, notifies=target.kind == "notebook"),
            folder=None if folder is None else str(folder),
            out=out,
        )

    def plan(self) -> str:
        """Return a description of the processes that would be started."""
        target, request = self.request.target, self.request
        if request.emit is not None:
            return self.manifest().rstrip("\n")
        if request.is_for_slurm:
            batch = self.batch()
            return f"would write {batch.path} and submit it with sbatch:\n{batch.text.rstrip()}"
        words = shlex.join(self._target_words())
        lines = [f"{target.kind} {words}"]
        if target.kind == "notebook":
            lines.append("one process runs its cells in order; %%accelerate cells run on workers of their own")
        if self.scheduler is not None and self.scheduler.is_rank:
            lines.append(
                f"rank {self.scheduler.rank} of {self.scheduler.size}, which {self.scheduler.scheduler} has started"
            )
        elif not self.machines.is_single_machine:
            where = self.machines
            lines.append(f"{where.nnodes} machines, rendezvous at {where.endpoint} ({where.backend}); on this one:")
        if self.specs:
            lines.append(describe_plan(self.resolved, self.specs))
        if request.max_restarts:
            folder = self.resolved.config.checkpoint.dir
            where = "from the start" if folder is None else f"from the newest checkpoint in {folder}"
            lines.append(f"up to {request.max_restarts} restarts, {where}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes if note not in self.resolved.notes)])

    def run(self) -> JobResult:
        """Start the job and wait for its end, or print or submit it as requested.

        Does not return if this process becomes a rank.
        """
        if self.request.emit is not None:
            print(self.manifest(), end="")  # with its secrets, since it is applied as it is
            return JobResult(0)
        if self.request.is_for_slurm:
            batch = self.batch()
            batch.write()
            print(f"wrote {batch.path}")
            print(f"submitted job {batch.submit()}")
            return JobResult(0)
        if self.scheduler is not None and self.scheduler.is_rank:
            self._become_rank(self.scheduler)
        recording = self._record()
        try:
            ending = self._run_task(self.task(None if recording is None else recording.folder))
        except BaseException as error:
            self._report_end(recording, "failed", str(error))
            raise
        outcome = "done" if ending.reason is None else "interrupted" if ending.reason == "interrupted" else "failed"
        self._report_end(recording, outcome, ending.lines[0][-2000:] if ending.lines else None, ending.code)
        return ending

    def _report_end(
        self, recording: RunRecording | None, outcome: Outcome, error: str | None, code: int | None = None
    ) -> None:
        """Complete the record of the run, and send the notifications that the options name."""
        if recording is None:
            return
        recording.finish(outcome, exit_code=code, error=error)
        run = recording.run if recording.folder is None else read_run(recording.folder)
        end = RunEnd(run.name, outcome, run.duration_s or 0.0, run.num_steps, run.metrics, error)
        sender = notify(end, self.resolved.config.notify)
        if sender is not None:
            sender.join()  # the process ends after this

    def batch(self) -> BatchFile:
        """Return the batch file for Slurm."""
        config, request = self._schedulable_config(), self.request
        return make_batch(
            self.name, self._launch_words(), nnodes=int(request.machines.nnodes), gpus=config.gpus, cpus=config.cpus,
            options=request.sbatch,
        )  # fmt: skip

    def manifest(self) -> str:
        """Return the Kubeflow manifest."""
        config, request = self._schedulable_config(), self.request
        return train_job(
            self.name, self._launch_words(), nnodes=int(request.machines.nnodes), gpus=config.gpus, cpus=config.cpus,
            image=request.image,
        )  # fmt: skip

    def _schedulable_config(self) -> Config:
        """Return the options; raise `ConfigError` for workers that these schedulers cannot provide."""
        if self.resolved.config.tpus is not None:
            raise ConfigError(
                f"tpus from {self.resolved.origins['tpus']}: a scheduler provides GPUs or processors only; run the "
                "launch on the TPU's machine"
            )
        return self.resolved.config

    def _launch_words(self) -> list[str]:
        """Return the words of the launch on each machine, without the flags for the scheduler."""
        imported = self.request.imported
        flags, resolved = self.request.flags, self.resolved
        values = {name: value for name, value in flags.values.items() if name != "dry_run"}
        if imported is not None:  # the file is not read again: this launch has read its machines
            of_file = {
                name: resolved.given[name]
                for name in imported.layer.values
                if name in resolved.given and resolved.origins[name] == imported.layer.origin(name)
            }
            values = of_file | values
        words = shlex.split(flags_to_line(replace(flags, values=values)))
        if self.request.max_restarts:
            words += ["--max-restarts", str(self.request.max_restarts)]
        if self.request.out is not None:
            words += ["--out", self.request.out]
        return [*words, *self._target_words()]

    def _target_words(self) -> list[str]:
        target = self.request.target
        return [*(["-m"] if target.kind == "module" else []), target.name, *target.args]

    def _record(self) -> RunRecording | None:
        """Begin the record of the run; of machines with numbers (``--node-rank``) only the first records it."""
        if self.machines.node_rank not in (None, 0):
            return None
        target = self.request.target
        return RunRegistry().begin("launch", target.name, self.resolved, name=self.name, args=target.args)

    def _run_task(self, task: RankTask) -> JobResult:
        config, args = self.resolved.config, self.request.target.args
        if not self.machines.is_single_machine:
            is_host = None if self.scheduler is None else self.scheduler.rank == 0
            command = agent_command(
                self.machines, len(self.specs), self.request.max_restarts, task, args, is_host=is_host
            )
            variables = agent_variables(self.machines, self.specs[0].num_threads, self._overrides())
            return run_agent(command, variables, timeout_s=config.timeout)
        is_notebook = task.kind == "notebook"
        shown = range(len(self.specs)) if config.show_ranks == "all" else {0, *config.show_ranks}
        job = LocalJob(
            task,
            args,
            self.specs[:1] if is_notebook else self.specs,
            shown_ranks=frozenset(shown),
            is_slow_to_finish=is_notebook,
            timeout_s=None if is_notebook else config.timeout,  # the timeout applies to each of its cells
            max_restarts=self.request.max_restarts,
            variables=self._overrides(),
        )
        return job.run()

    def _overrides(self) -> dict[str, str]:
        """Return environment variables for the ranks: no GPU is visible to ranks that train on the CPU."""
        if self.request.target.kind == "notebook" or self.specs[0].device != "cpu":
            return {}
        is_single = len(self.specs) == 1 and self.machines.is_single_machine and self.scheduler is None
        return {"CUDA_VISIBLE_DEVICES": "", **({} if is_single else CPU_RANK)}

    def _become_rank(self, position: SchedulerPosition) -> None:
        address, port = position.address, position.port
        if self.request.machines.endpoint is not None:
            host, _, text = self.request.machines.endpoint.rpartition(":")
            address, port = host.strip("[]"), int(text)
        if address is None:
            raise ConfigError(
                f"{position.scheduler} provides no address of rank 0; set MASTER_ADDR to its machine, in every process"
            )
        world = World(position.rank, position.size, position.local_rank, position.local_size)
        variables = {"OMP_NUM_THREADS": str(self.specs[0].num_threads), **all_variables(), **self._overrides()}
        variables |= rank_variables(world, address=address, port=port, machine=position.machine)
        if address == "127.0.0.1":
            variables["GLOO_SOCKET_IFNAME"] = find_loopback()
        os.execve(sys.executable, self.task().command(sys.executable, self.request.target.args), variables)


def _is_submitted_later(request: LaunchRequest) -> bool:
    return request.is_for_slurm or request.emit is not None


def _assign_workers(
    request: LaunchRequest, resolved: Resolved, position: SchedulerPosition | None
) -> tuple[WorkerSpec, ...]:
    """Return this machine's workers; raise ConfigError if a scheduler has started another number of them."""
    config = resolved.config
    specs = assign_devices(gpus=config.gpus, cpus=config.cpus, tpus=config.tpus)
    if position is None and request.machines.is_single_machine:
        resolved.check_world(len(specs))
    if position is None or not position.is_rank:
        return specs
    count = config.cpus if config.gpus is None else config.gpus
    if isinstance(count, int) and count != position.local_size:
        option = "cpus" if config.gpus is None else "gpus"
        raise ConfigError(
            f"{option} {count} from {resolved.origins[option]}: {position.scheduler} has started "
            f"{position.local_size} ranks on this machine; give {position.local_size} or remove it, or start one "
            "process on each machine"
        )
    threads = max(1, sum(spec.num_threads for spec in specs) // position.local_size)
    return (WorkerSpec(specs[0].device, threads),)


def _find_machines(position: SchedulerPosition, request: LaunchRequest) -> Machines:
    """Return the machines of a scheduler with their endpoint."""
    endpoint = request.machines.endpoint or (
        None if position.address is None else f"{position.address}:{position.port}"
    )
    if endpoint is None:
        raise ConfigError(
            f"{position.scheduler} provides no address for its machines; give --nnodes and --rdzv-endpoint"
        )
    return Machines(str(position.size), position.rank, request.machines.backend, endpoint, request.machines.id)


def _check_machines(position: SchedulerPosition, given: Machines) -> None:
    """Raise `ConfigError` if the flags contradict the machines on which a scheduler has started processes."""
    low, _, high = given.nnodes.partition(":")
    if not given.is_single_machine and not int(low) <= position.num_machines <= int(high or low):
        raise ConfigError(
            f"--nnodes {given.nnodes}: {position.scheduler} has started processes on {position.num_machines} machines; "
            f"give {position.num_machines}, or remove it"
        )
    if given.node_rank not in (None, position.machine):
        raise ConfigError(
            f"--node-rank {given.node_rank}: this is machine {position.machine} of those on which "
            f"{position.scheduler} has started processes; remove it"
        )
