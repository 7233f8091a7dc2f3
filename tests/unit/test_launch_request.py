"""``accel-nb launch`` before anything starts: what it is given, where it is, and what it would start."""

from __future__ import annotations

import ast
import os
import shlex
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

from accel_nb.cli.main import main
from accel_nb.config import Layer
from accel_nb.errors import ConfigError
from accel_nb.launch.job import LaunchJob
from accel_nb.launch.kubeflow import object_name
from accel_nb.launch.multi_node import agent_command
from accel_nb.launch.rank_task import RankTask
from accel_nb.launch.request import FLAGS, read_request
from accel_nb.launch.scheduler import find_scheduler_position, first_host
from accel_nb.launch.slurm import make_batch


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "broken.py").write_text("x = 1\nfor in y:\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "package" / "train.py").write_text("")
    os.mkfifo(tmp_path / "fifo.py")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]), tmp_path / "some.ipynb")
    (tmp_path / "forged.ipynb").write_text('{"nbformat": 4, "cells": 3}')
    return tmp_path


def test_what_follows_the_target_is_passed_on_untouched():
    words = ["--lr", "0.1", "--cpus", "9", "--", "-m", "a b", "$(touch x)", ""]
    request = read_request(["--cpus", "2", "--precision=bf16", "--no-panel", "train.py", *words])
    assert request.target.name == "train.py"
    assert list(request.target.args) == words
    job = LaunchJob.from_request(request)
    assert job.resolved.given == {"cpus": 2, "precision": "bf16", "panel": False}
    assert str(job.resolved.origins["cpus"]) == "--cpus 2 (flags)"
    task = job.task()
    assert task.command("python", request.target.args)[4:] == words


def test_a_module_is_found_without_being_imported():
    request = read_request(["--max-restarts", "2", "-m", "package.train", "x"])
    assert (request.target.kind, request.target.name, request.target.args) == ("module", "package.train", ("x",))
    assert request.max_restarts == 2


def test_options_may_need_what_a_variable_sets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCEL_NB_CHECKPOINT__DIR", "runs")
    job = LaunchJob.from_request(read_request(["--cpus", "2", "--every", "10", "train.py"]))
    assert job.resolved.config.checkpoint.every == 10


def test_scripts_for_any_number_of_machines_run_on_one():
    request = read_request(["--nnodes", "1", "--node-rank", "0", "train.py"])
    assert LaunchJob.from_request(request).machines.is_single_machine


def test_the_url_of_notifications_is_not_among_the_words_of_a_rank():
    job = LaunchJob.from_request(read_request(["--cpus", "1", "--notify.url", "http://x/secret", "train.py"]))
    assert not any("secret" in word for word in job.task().command("python", ()))
    notebook = LaunchJob.from_request(read_request(["--cpus", "1", "--notify.url", "http://x/secret", "some.ipynb"]))
    assert any("secret" in word for word in notebook.task().command("python", ()))


def test_a_module_is_found_by_every_finder(scripts: Path, monkeypatch: pytest.MonkeyPatch):
    (scripts / "src").mkdir()
    (scripts / "package").rename(scripts / "src" / "edited")

    class Editable:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            return PathFinder.find_spec(name, [str(scripts / "src")]) if name == "edited" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Editable])
    assert read_request(["-m", "edited.train"]).target.name == "edited.train"


BAD = {
    "--gpu 4 train.py": "--gpu is not a flag of accel-nb launch; did you mean --gpus?",
    "--nnode 2 train.py": "did you mean --nnodes?",
    "--num_processes 2 train.py": "as it is of accelerate's: --gpus N, or --cpus N",
    "--use-fsdp train.py": "as it is of accelerate's: --strategy fsdp",
    "--cpus 0 train.py": "cpus: 0 from --cpus 0 (flags) is not allowed; give a whole number from 1 to 256",
    "--cpus": "--cpus needs a value: --cpus N",
    "--cpus --gpus 2 train.py": "--cpus needs a value",
    "--slurm=yes train.py": "the flag takes no value",
    "--nnodes 0 train.py": "--nnodes 0 is not allowed",
    "--nnodes 3:2 train.py": "MIN:MAX goes upwards",
    "--nnodes 2 train.py": "--nnodes needs --rdzv-endpoint",
    "--nnodes 2 --rdzv-endpoint host train.py": "--rdzv-endpoint host is not allowed; give HOST:PORT",
    "--nnodes 2 --rdzv-endpoint host:99999 train.py": "a port is from 1 to 65535",
    "--nnodes 2 --rdzv-endpoint $(id):1 train.py": "is not allowed; give HOST:PORT",
    "--nnodes 2 --rdzv-endpoint -oProxy:1 train.py": "is not allowed; give HOST:PORT",
    "--nnodes 2 --node-rank 2 --rdzv-endpoint h:1 train.py": "--node-rank 2 is outside of --nnodes 2",
    "--nnodes 2 --rdzv-backend static --rdzv-endpoint h:1 train.py": "static needs --node-rank",
    "--node-rank 1 train.py": "outside of --nnodes 1",
    "--rdzv-endpoint h:1 train.py": "no effect on one machine",
    "--node-rank 0 train.py": "--node-rank has no effect on one machine",
    "--rdzv-backend c10d --rdzv-id x train.py": "--rdzv-backend and --rdzv-id have no effect on one machine",
    "--slurm --nnodes 2 --rdzv-id x train.py": "a scheduler connects its machines itself; remove --rdzv-id",
    "--slurm --rdzv-backend c10d train.py": "a scheduler connects its machines itself; remove --rdzv-backend",
    "--rdzv-id a;b train.py": "--rdzv-id a;b is not allowed",
    "--max-restarts -1 train.py": "a whole number from 0 to 1000",
    "--emit helm train.py": "--emit helm is not allowed; give kubeflow",
    "--slurm --emit kubeflow train.py": "only one of the two",
    "--sbatch time=1 train.py": "belongs to --slurm",
    "--slurm --sbatch wrap=id train.py": "is set by the launch",
    "--slurm --sbatch time=1 --sbatch time=2 train.py": "--sbatch time is given with two values",
    "--slurm --sbatch": "--sbatch needs a value: --sbatch NAME=VALUE",
    "--slurm --nnodes 1:2 train.py": "a fixed number of machines",
    "--image x train.py": "belongs to --emit",
    "--out x.ipynb train.py": "train.py is a script",
    "--out nowhere/x.ipynb some.ipynb": "give the path of a file in an existing folder",
    "--out ./some.ipynb some.ipynb": "is the notebook itself",
    "--cpus 2": "needs a target",
    "trian.py": "did you mean train.py?",
    "broken.py": "broken.py, line 2: is not Python",
    "package": "package: is a folder",
    "fifo.py": "is not a plain file",
    "forged.ipynb": "forged.ipynb: is not a notebook",
    "--nnodes 2 --rdzv-endpoint h:1 some.ipynb": "runs on one machine",
    "-m": "-m needs the name of a module",
    "-m os;id": "is not a module's name",
    "-m nothing.here": "there is no module nothing",
    "-m package.nothing": "there is no module nothing in package",
    "-m package": "a package without __main__.py",
    "--show-ranks 2 --cpus 2 train.py": "rank 2 is outside of a world of 2",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_starts_nothing(line: str, scripts: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted(scripts.rglob("*"))
    assert main(["launch", *shlex.split(line)]) == 2
    reported = capsys.readouterr()
    assert BAD[line] in reported.err
    assert len(reported.err.strip().splitlines()) == 1
    assert reported.out == ""
    assert sorted(scripts.rglob("*")) == before


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "--cpus", "0", "--nnodes", "x", "--sbatch", "a", "train.py"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 3


@pytest.mark.parametrize("text", ["a\nb=c", "time=1\n#SBATCH", 'time=1"', "time=\x1b[1m", "Time=1"])
def test_options_of_sbatch_cannot_leave_their_line(text: str):
    with pytest.raises(ConfigError, match="is not allowed"):
        read_request(["--slurm", "--sbatch", text, "train.py"])


def test_every_flag_of_the_launch_is_in_its_help(capsys: pytest.CaptureFixture[str]):
    assert main(["launch", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"{flag} " in text for flag in FLAGS)


def test_a_dry_run_prints_the_plan_and_writes_nothing(scripts: Path, capsys: pytest.CaptureFixture[str]):
    before = sorted(scripts.rglob("*"))
    words = ["--cpus", "2", "--checkpoint", "runs", "--max-restarts", "3", "--dry-run", "--no-panel", "train.py", "a b"]
    assert main(["launch", *words]) == 0
    text = capsys.readouterr().out
    assert "script train.py 'a b'" in text
    assert "2 workers: 2 x cpu" in text
    assert "cpus = 2 from --cpus 2 (flags)" in text
    assert "up to 3 restarts, from the newest checkpoint in runs" in text
    assert "panel from --no-panel (flags) has no effect: a script has no cell" in text
    assert sorted(scripts.rglob("*")) == before


def test_a_run_of_a_module_has_its_name():
    assert LaunchJob.from_request(read_request(["--cpus", "1", "-m", "package.train"])).name == "package.train"


def test_a_dry_run_of_a_module_prints_words_for_a_shell():
    plan = LaunchJob.from_request(read_request(["--cpus", "1", "-m", "package.train", "a b"])).plan()
    assert plan.startswith("module -m package.train 'a b'\n")


def test_a_job_of_a_scheduler_writes_the_copy_of_a_notebook(scripts: Path):
    nbformat.write(nbformat.v4.new_notebook(), scripts / "some.ipynb")
    job = LaunchJob.from_request(read_request(["--slurm", "--out", "ran.ipynb", "some.ipynb"]))
    assert "'--out',\n    'ran.ipynb',\n    'some.ipynb'," in job.batch().text


def test_a_notebook_brings_its_own_options(scripts: Path):
    notebook = nbformat.v4.new_notebook(
        metadata={"accel_nb": {"options": {"accumulate": 4, "ddp": {"bucket_cap_mb": 5}}}}
    )
    nbformat.write(notebook, scripts / "stored.ipynb")
    config = LaunchJob.from_request(read_request(["--accumulate", "2", "stored.ipynb"])).resolved
    assert (config.config.accumulate, config.config.ddp.bucket_cap_mb) == (2, 5)
    assert str(config.origins["ddp.bucket_cap_mb"]) == "stored.ipynb, metadata (notebook)"
    notebook.metadata["accel_nb"]["options"]["accumulate"] = 0
    nbformat.write(notebook, scripts / "stored.ipynb")
    with pytest.raises(ConfigError, match=r"accumulate: 0 from stored.ipynb, metadata"):
        read_request(["stored.ipynb"])


def test_a_task_survives_its_document_and_a_damaged_one_is_refused():
    layer = Layer("flags", {"cpus": 2}, "command line", {"cpus": "--cpus 2"})
    task = RankTask("script", "train.py", (layer,), report_file=7, parent=1)
    assert RankTask.from_json(task.to_json()) == task
    for text in ("", "[]", '{"version": 2}', '{"version": 1, "layers": [1]}', "[" * 100_000):
        with pytest.raises(ConfigError, match="damaged task"):
            RankTask.from_json(text)


OMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
}  # fmt: skip


def test_schedulers_are_detected_by_their_variables():
    assert find_scheduler_position({}, 1) is None
    mpi = find_scheduler_position(OMPI, 1)
    assert mpi is not None
    assert (mpi.rank, mpi.size, mpi.local_rank, mpi.local_size, mpi.address) == (3, 4, 1, 2, None)
    alone = find_scheduler_position({**OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 1)
    assert alone is not None
    assert (alone.is_rank, alone.address) == (True, "127.0.0.1")
    mpich = find_scheduler_position({"PMI_RANK": "0", "PMI_SIZE": "2"}, 9)
    assert mpich is not None
    assert (mpich.is_rank, mpich.port) == (True, find_scheduler_position({"PMI_RANK": "1", "PMI_SIZE": "2"}, 9).port)  # type: ignore[union-attr]
    slurm = find_scheduler_position(SRUN, 1)
    assert slurm is not None
    assert (slurm.is_machine, slurm.rank, slurm.address) == (True, 1, "gpu07")
    ranks = find_scheduler_position({**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, 1)
    assert ranks is not None
    assert (ranks.is_rank, ranks.local_size) == (True, 2)
    pod = find_scheduler_position(
        {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0", "PET_MASTER_PORT": "1"}, 1
    )
    assert pod is not None
    assert (pod.is_machine, pod.address, pod.port) == (True, "job-0", 1)


def test_tasks_of_slurm_are_placed_by_the_number_of_their_node():
    """Of five tasks on three nodes, also where they go round (cyclic) and nodes have unequal numbers."""
    uneven = {**SRUN, "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)"}
    for rank, (node, local_rank, local_size) in enumerate([(0, 0, 1), (1, 0, 2), (2, 0, 2), (1, 1, 2), (2, 1, 2)]):
        task = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local_rank)}
        place = find_scheduler_position({**uneven, **task}, 1)
        assert place is not None
        assert (place.machine, place.local_rank, place.local_size) == (node, local_rank, local_size)
        assert place.is_rank
    with pytest.raises(ConfigError, match="SLURM_NODEID 3 of 3 machines"):
        find_scheduler_position({**uneven, "SLURM_NODEID": "3"}, 1)


def test_a_batch_script_itself_is_no_rank_and_nonsense_is_refused():
    assert find_scheduler_position({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, 1) is None
    assert find_scheduler_position({**OMPI, "OMPI_COMM_WORLD_SIZE": "1"}, 1) is None
    with pytest.raises(ConfigError, match="variables are not valid"):
        find_scheduler_position({**OMPI, "OMPI_COMM_WORLD_SIZE": "many"}, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[07-09,12],x", "gpu07"), ("n[3]-ib", "n3-ib"), ("x,y[1-2]", "x"), ("", None)],
)
def test_the_first_of_a_node_list(nodes: str, first: str | None):
    assert first_host(nodes) == first


def test_a_count_that_mpi_has_not_started_is_refused():
    with pytest.raises(ConfigError, match=r"cpus 4 from --cpus 4 \(flags\): MPI has started 2 ranks on this machine"):
        LaunchJob.from_request(read_request(["--cpus", "4", "train.py"]), OMPI)
    job = LaunchJob.from_request(read_request(["--cpus", "2", "train.py"]), OMPI)
    assert "rank 3 of 4, which MPI has started" in job.plan()
    with pytest.raises(ConfigError, match="a notebook needs one"):
        LaunchJob.from_request(read_request(["some.ipynb"]), OMPI)


def test_other_machines_than_those_of_the_scheduler_are_refused():
    several = ["--rdzv-endpoint", "h:1", "--cpus", "2"]
    with pytest.raises(ConfigError, match="--nnodes 4: Slurm has started processes on 2 machines; give 2"):
        LaunchJob.from_request(read_request(["--nnodes", "4", *several, "train.py"]), SRUN)
    with pytest.raises(ConfigError, match="--node-rank 0: this is machine 1 of those"):
        LaunchJob.from_request(read_request(["--nnodes", "2", "--node-rank", "0", *several, "train.py"]), SRUN)
    job = LaunchJob.from_request(read_request(["--nnodes", "1:2", *several, "train.py"]), SRUN)
    assert (job.machines.nnodes, job.machines.endpoint) == ("2", "h:1")


def test_options_that_the_ranks_of_a_scheduler_cannot_have_are_named_once():
    words = ["--timeout", "60", "--notify.url", "http://x", "--max-restarts", "2", "train.py"]
    first = LaunchJob.from_request(read_request(words), {**OMPI, "OMPI_COMM_WORLD_RANK": "0"})
    assert [note.partition(" has no effect: ")[0] for note in first.notes] == [
        "timeout from --timeout 60 (flags)", "notify.url from --notify.url http://x (flags)", "--max-restarts"
    ]  # fmt: skip
    assert "MPI starts and ends the ranks" in first.notes[0]
    assert LaunchJob.from_request(read_request(words), OMPI).notes == []


def test_a_rank_connects_to_an_address_of_version_6(monkeypatch: pytest.MonkeyPatch):
    class Started(Exception):
        pass

    def execve(program: str, words: list[str], variables: dict[str, str]) -> None:
        raise Started(variables["MASTER_ADDR"], variables["MASTER_PORT"])

    monkeypatch.setattr(os, "execve", execve)
    request = read_request(["--nnodes", "2", "--rdzv-endpoint", "[fe80::1]:29500", "--cpus", "2", "train.py"])
    job = LaunchJob.from_request(request, OMPI)
    with pytest.raises(Started) as caught:
        job.run()
    assert caught.value.args == ("fe80::1", "29500")


def test_machines_of_slurm_meet_at_the_first_one():
    job = LaunchJob.from_request(read_request(["--cpus", "2", "train.py", "x"]), SRUN)
    words = agent_command(job.machines, 2, 1, job.task(), ("x",), is_host=False)
    assert words[2:5] == ["torch.distributed.run", "--nnodes", "2"]
    assert words[words.index("--node-rank") + 1] == "1"
    assert words[words.index("--rdzv-endpoint") + 1].startswith("gpu07:")
    assert words[-4:-2] == ["-m", "accel_nb.launch.rank"]
    assert words[-1] == "x"


def test_a_batch_file_is_python_and_its_words_pass_no_shell(scripts: Path):
    evil = "$(touch evil); `id` \"'\\ \n x"
    request = read_request(["--slurm", "--nnodes", "2", "--sbatch", "time=2:00:00", "--cpus", "2", "train.py", evil])
    batch = LaunchJob.from_request(request).batch()
    lines = batch.text.splitlines()
    assert lines[0].startswith("#!")
    assert {"#SBATCH --nodes=2", "#SBATCH --time=2:00:00", "#SBATCH --ntasks-per-node=1"} <= set(lines)
    command = next(node.value for node in ast.parse(batch.text).body if isinstance(node, ast.Assign))
    words = ast.literal_eval(command)
    assert words[0] == "srun"
    assert words[words.index("launch") :] == ["launch", "--cpus", "2", "train.py", evil]
    batch.write()
    assert batch.path == scripts / "train.sbatch"
    batch.write()  # it is ours: written anew
    batch.path.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="has not written it"):
        batch.write()


def test_without_sbatch_the_file_stays_and_the_problem_is_named(scripts: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(scripts))
    batch = make_batch("a/b c", ["train.py"], nnodes=1, gpus=None, cpus=None)
    assert batch.path.name == "a_b_c.sbatch"
    batch.write()
    with pytest.raises(ConfigError, match="there is no sbatch on this machine"):
        batch.submit()


def test_a_manifest_has_its_words_unchanged_and_names_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ACCEL_NB_PRECISION", "bf16")
    assert main(["launch", "--emit", "kubeflow", "--gpus", "2", "train.py", "--token=abcdefghijkl"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["spec"]["trainer"]["args"][-1] == "--token=abcdefghijkl"
    assert "note: precision from ACCEL_NB_PRECISION=bf16 (environment) is not in the manifest" in printed.err


def test_a_manifest_names_machines_devices_and_words(capsys: pytest.CaptureFixture[str]):
    words = [
        "--emit",
        "kubeflow",
        "--image",
        "me/train:1",
        "--nnodes",
        "4",
        "--gpus",
        "8",
        "--name",
        "My Run",
        "train.py",
        "a b",
    ]
    assert main(["launch", *words]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert (job["kind"], job["metadata"]["name"]) == ("TrainJob", "my-run")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["image"]) == (4, "me/train:1")
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == 8
    assert trainer["args"] == ["--gpus", "8", "--name", "My Run", "train.py", "a b"]
    assert object_name("-- ..") == "job"
