"""Trackers with their real packages: a job on two ranks writes to local disk, is resumed, and is read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.trackers.job import NAMES

DEADLINE_S = 300


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Run a job and its resumption; returns the folder, and what the ranks of both said."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "artifact.txt").write_text("kept")
    environment = os.environ | {
        "HOME": str(folder / "home"),
        "TRACKIO_DIR": str(folder / "trackio"),
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "COMET_OFFLINE_DIRECTORY": str(folder / "comet"),
        "SWANLAB_SAVE_DIR": str(folder / "home"),
        "WANDB_ERROR_REPORTING": "false",
        "DO_NOT_TRACK": "1",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    }
    (folder / "home").mkdir()
    said: list[dict[str, Any]] = []
    for part in ("first", "resumed", "down"):
        done = subprocess.run(
            [sys.executable, "-m", "tests.trackers.job", str(folder), part],
            env=environment | {"PYTHONPATH": str(Path(__file__).parents[2])},
            cwd=folder,  # DVCLive begins a repository of its own in the one where it is started
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said += json.loads(done.stdout.splitlines()[-1])
    return folder, said


def _read(folder: Path, script: str) -> Any:
    """Read files back by a package, in a process of its own: such packages leave threads and variables behind."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import json, sys\nfolder = sys.argv[1]\n{script}\nprint(json.dumps(found))",
            str(folder),
        ],
        env=os.environ | {"HOME": str(folder / "home"), "TRACKIO_DIR": str(folder / "trackio")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_tracker_failed_and_only_the_main_rank_imported_any(job: tuple[Path, list[dict[str, Any]]]) -> None:
    _, said = job
    assert len(said) == 5
    for rank in said[:4]:
        if rank["rank"] == 0:
            assert set(rank["imported"]) == set(NAMES) - {"jsonl", "tensorboard"}
            assert all("keeps no" in problem for problem in rank["problems"]), rank["problems"]
        else:
            assert rank["imported"] == []
            assert rank["problems"] == []


def test_a_server_that_is_down_is_reported_once_and_the_others_go_on(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, said = job
    [problem] = said[4]["problems"]
    assert problem.startswith("tracker mlflow failed and receives no more values; the run continues")
    lines = [json.loads(line) for line in (folder / "down.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]


def test_wandb(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = job
    files = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2, "one for each job, whatever the number of ranks"
    assert len({path.name for path in files}) == 1, "both under one id"
    content = files[0].read_bytes()
    assert b"loss" in content
    assert b"0.5" in content
    assert b"hunter2" not in content
    assert list(files[0].parent.glob("files/media/images/picture_*.png"))
    assert list(files[0].parent.glob("files/media/table/scores_*.json"))


def test_mlflow(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = job
    found = _read(
        folder,
        """
from mlflow import MlflowClient
client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
experiment = client.get_experiment_by_name("digits")
runs = client.search_runs([experiment.experiment_id])
run = runs[0]
found = {
    "runs": len(runs), "status": run.info.status, "params": run.data.params, "note": run.data.tags["note"],
    "loss": [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")],
    "both": run.data.metrics["both/b"],
    "files": [item.path for at in ("", "images", "tables") for item in client.list_artifacts(run.info.run_id, at)],
}
""",
    )
    assert found["runs"] == 1
    assert found["status"] == "FINISHED"
    assert found["params"] == {"lr": "0.1", "api_key": "***"}
    assert sorted(map(tuple, found["loss"])) == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75)]
    assert found["both"] == 2.0
    assert found["note"] == "resumed 3"
    assert {"artifact.txt", "images/picture_2.png", "tables/scores_2.json"} <= set(found["files"])


def _comet_messages(archive: Path) -> list[dict[str, Any]]:
    with zipfile.ZipFile(archive) as file:
        return [json.loads(line) for line in file.read("messages.json").splitlines()]


def test_comet(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = job
    archives = sorted((folder / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    assert len(archives) == 2
    keys = set()
    for archive in archives:
        with zipfile.ZipFile(archive) as file:
            keys.add(json.loads(file.read("experiment.json"))["offline_id"])
    assert len(keys) == 1, "both under one key"
    text = json.dumps([_comet_messages(archive) for archive in archives])
    assert '"loss"' in text
    assert "both/b" in text
    assert "hunter2" not in text
    with zipfile.ZipFile(archives[0]) as file:
        assert any("scores" in json.dumps(message) for message in _comet_messages(archives[0]))
        assert any("artifact.txt" in json.dumps(message) for message in _comet_messages(archives[0]))
        assert any("picture" in json.dumps(message) for message in _comet_messages(archives[0]))
        assert len(file.namelist()) >= 4


def test_clearml(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = job
    archives = sorted((folder / "clearml").glob("**/offline-*.zip"), key=lambda path: path.stat().st_mtime)
    assert len(archives) == 2
    with zipfile.ZipFile(archives[0]) as file:
        names = file.namelist()
        metrics = file.read(next(name for name in names if name.endswith("metrics.jsonl"))).decode()
        task = file.read("task.json").decode()
    assert '"loss"' in metrics
    assert '"scores"' in metrics
    assert "hunter2" not in "".join(names) + metrics + task
    assert any("picture" in name for name in names)
    assert any("artifact.txt" in name for name in names)


def test_aim(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = job
    found = _read(
        folder,
        """
import aim
from aim.storage.context import Context
runs = aim.Repo(folder).list_all_runs()  # those that no server has put into its index, too
run = aim.Run(runs[0], repo=folder, system_tracking_interval=None, capture_terminal_logs=False)
loss = run.get_metric("loss", Context({}))
steps, (values, _, _) = loss.data.numpy()
found = {
    "runs": len(runs), "hparams": run["hparams"], "experiment": run.experiment,
    "loss": [(int(s), float(v)) for s, v in zip(steps, values)],
    "names": sorted(name for name, *_ in run.iter_metrics_info()),
    "has_picture": run.get_image_sequence("picture", Context({})) is not None,
}
""",
    )
    assert found["runs"] == 1
    assert found["experiment"] == "digits"
    assert found["hparams"] == {"lr": 0.1, "api_key": "***"}
    assert [tuple(item) for item in found["loss"]] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert {"both/a", "both/b", "loss"} <= set(found["names"])
    assert found["has_picture"]


def test_swanlab(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = job
    runs = sorted((folder / "swanlog").glob("run-*"))
    assert len(runs) == 2
    content = b"".join(path.read_bytes() for path in runs[0].rglob("*") if path.is_file())
    assert b"loss" in content
    assert b"hunter2" not in content
    assert list(runs[0].rglob("*.png"))


def test_trackio(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = job
    found = _read(
        folder,
        """
from trackio.sqlite_storage import SQLiteStorage
runs = SQLiteStorage.get_runs("digits")
rows = [row for run in runs for row in SQLiteStorage.get_logs("digits", run)]
found = {"runs": runs, "loss": [(row["step"], row["loss"]) for row in rows if "loss" in row], "all": str(rows)}
""",
    )
    assert len(found["runs"]) == 1
    assert [tuple(item) for item in found["loss"]] == [(1, 0.25), (2, 0.5), (3, 0.75), (3, 0.75)]
    assert "hunter2" not in found["all"]
    assert "scores" in found["all"]
    assert list((folder / "trackio").rglob("*.png"))


def test_dvclive(job: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = job
    rows = (folder / "digits/plots/metrics/loss.tsv").read_text().splitlines()
    assert rows == ["step\tloss", "1\t0.25", "2\t0.5", "3\t0.75", "3\t0.75"]
    assert json.loads((folder / "digits/metrics.json").read_text())["loss"] == 0.75
    assert "hunter2" not in (folder / "digits/params.yaml").read_text()
    assert (folder / "digits/plots/images/picture.png").is_file()
