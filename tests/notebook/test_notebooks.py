"""The notebooks that we show: executed from top to bottom in a real kernel, and clean in the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import psutil
import pytest

from accel_nb.cli import demo
from accel_nb.cli.main import main
from tests.conftest import wait_for
from tests.notebook.execution import FOLDER, Executed, execute
from tests.support.nightly import nightly

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

pytestmark = pytest.mark.timeout(1300)


@pytest.fixture(scope="module")
def quickstart() -> Executed:
    return execute(
        "01_quickstart.ipynb",
        '{"accuracy": accuracy, "losses": losses, "same": first_weight is model[0].weight}',
    )


@pytest.fixture(scope="module")
def language_model() -> Executed:
    return execute(
        "02_language_model.ipynb",
        '{"losses": losses, "test_loss": test_loss, "num_steps": num_steps, "last_epoch": scheduler.last_epoch, '
        '"same": optimizer.param_groups[0]["params"][0] is model.embed.weight, '
        '"dtypes": sorted({str(p.dtype) for p in model.parameters()})}',
    )


@pytest.fixture(scope="module")
def machines() -> Executed:
    return execute("09_several_machines.ipynb", '{"accuracy": accuracy, "left": folder.exists()}', has_workers=False)


@pytest.fixture(scope="module")
def resume() -> Executed:
    return execute(
        "03_resume.ipynb",
        '{"lost": lost, "repeated": repeated, "first": first, "last": max(step for _, step, _ in kept), '
        '"epochs": sorted({epoch for epoch, _, _ in kept}), "accuracy": accuracy, "schedule": scheduler.last_epoch, '
        '"left": [name for name in ("runs", "seen") if Path(name).exists()]}',
    )


@pytest.fixture(scope="module")
def bigger_than_memory() -> Executed:
    if find_spec("deepspeed") is None:
        pytest.skip("deepspeed is an extra")
    return execute(
        "05_bigger_than_memory.ipynb",
        '{"losses": {name: way["losses"] for name, way in ways.items()}, "apart": apart, "accuracy": accuracy, '
        '"held": {name: way["held"] for name, way in ways.items()}}',
    )


@pytest.fixture(scope="module")
def big_model() -> Executed:
    return execute(
        "06_big_model.ipynb",
        '{"same": same, "text": text, "size": size, "limit": limit, "left": folder.exists(), '
        '"away": sum(p.numel() * 4 for p in model.parameters() if p.is_meta)}',
        has_workers=False,
    )


@pytest.fixture(scope="module")
def dimensions() -> Executed:
    return execute(
        "07_dimensions.ipynb",
        '{"losses": {name: way["losses"] for name, way in ways.items()}, '
        '"weights": max((a - b).abs().max().item() for way in ways.values() '
        'for a, b in zip(way["model"].parameters(), alone["model"].parameters(), strict=True))}',
    )


RUN_TWICE = ["quickstart", nightly("language_model")]
PLATFORMS = {
    "colab": {"COLAB_RELEASE_TAG": "release-colab-20261101", "COLAB_GPU": ""},
    "kaggle": {"KAGGLE_KERNEL_RUN_TYPE": "Interactive", "COLAB_RELEASE_TAG": "release-colab-20261101"},
}


@pytest.fixture(scope="module", params=[nightly("colab"), nightly("kaggle")])
def launcher(request: pytest.FixtureRequest) -> tuple[str, Executed]:
    """The launcher's notebook in the environment of a platform."""
    before = dict(os.environ)
    os.environ.update(PLATFORMS[request.param])
    try:
        return request.param, execute(
            "04_launcher.ipynb",
            '{"results": results, "accuracy": accuracy, "same": first_weight is model[0].weight, "ranks": ranks, '
            '"seconds": seconds, "revived": revived, '
            '"platform": __import__("accel_nb.runtime.process.platforms")'
            ".runtime.process.platforms.detect_platform().name}",
        )
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_the_launcher_gives_results_and_a_trained_model(launcher: tuple[str, Executed]) -> None:
    platform, executed = launcher
    facts = executed.facts()
    assert executed.errors() == {}
    assert facts["platform"] == platform
    assert [(result["rank"], result["samples"]) for result in facts["results"]] == [(0, 9000), (1, 9000)]
    assert facts["accuracy"] > 0.9
    assert facts["same"]
    assert "2 workers on cpu" in executed.displays("launch")[0]["text/plain"]
    assert any("image/png" in data for data in executed.displays("launch"))


def test_the_launcher_survives_errors_and_deaths(launcher: tuple[str, Executed]) -> None:
    _, executed = launcher
    facts = executed.facts()
    assert executed.text("fail") == "caught: the last worker has had enough\n"
    assert facts["revived"] == ["alive", "alive"]
    assert facts["ranks"] == [0, 1]
    assert executed.text("handlers") == "default_int_handler False\n"
    pids = executed.pids()
    assert len(pids) == 3
    assert wait_for(lambda: ended(pids))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def ended(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def test_quickstart_returns_a_trained_model(quickstart: Executed) -> None:
    facts = quickstart.facts()
    assert facts["accuracy"] > 0.9
    assert f"accuracy: {facts['accuracy']:.1%}" in quickstart.text("accuracy")
    assert facts["same"]
    assert mean(facts["losses"][-20:]) < 0.3 * mean(facts["losses"][:20])


def test_quickstart_says_what_it_runs_with(quickstart: Executed) -> None:
    receipt = quickstart.displays("train")[0]["text/plain"]
    for part in ("2 workers on cpu", "ddp", "precision no", "model Sequential", "Adam", "batch 64 = 2 x 32"):
        assert part in receipt


def test_quickstart_prints_each_epoch_once(quickstart: Executed) -> None:
    assert re.findall(r"^epoch +(\d+)", quickstart.text("train"), re.M) == [str(epoch) for epoch in range(15)]


def test_quickstart_shows_its_error_and_lives_on(quickstart: Executed) -> None:
    assert quickstart.errors() == {"error": ["ValueError"]}
    trace = "\n".join(quickstart.cell("error").outputs[-1].traceback)
    assert "rank 1 raised" in trace
    assert "worker 1 has had enough" in trace
    assert "pool: ready" in quickstart.text("status")


@pytest.mark.nightly
def test_language_model_learns(language_model: Executed) -> None:
    facts = language_model.facts()
    assert language_model.errors() == {}
    assert mean(facts["losses"][-50:]) < 0.5 * mean(facts["losses"][:10])
    assert facts["test_loss"] < 2.2
    assert facts["last_epoch"] == facts["num_steps"]  # the schedule counted optimizer steps


@pytest.mark.nightly
def test_language_model_comes_back_in_full_precision(language_model: Executed) -> None:
    facts = language_model.facts()
    assert "precision auto is" in language_model.displays("train")[0]["text/plain"]
    assert facts["dtypes"] == ["torch.float32"]
    assert facts["same"]


@pytest.mark.nightly
def test_language_model_writes_text(language_model: Executed) -> None:
    written = language_model.text("sample")
    assert written.startswith("def ")
    assert len(written.split()) > 20


@pytest.mark.nightly
def test_resume_loses_and_repeats_nothing(resume: Executed) -> None:
    facts = resume.facts()
    assert resume.errors() == {"two_workers": ["WorkerDied"], "one_worker": ["WorkerDied"]}
    assert (facts["lost"], facts["repeated"]) == (0, 0)
    assert "lost: 0, repeated: 0" in resume.text("counted")
    assert 1 < facts["first"]["2"] <= 41
    assert facts["first"]["2"] < facts["first"]["3"] <= 76
    assert (facts["last"], facts["epochs"]) == (5 * 23, [0, 1, 2, 3, 4])
    assert facts["schedule"] == 5  # epochs that passed by empty did not count twice
    assert facts["accuracy"] > 0.8
    assert facts["left"] == []


@pytest.mark.nightly
def test_resume_says_what_it_resumed(resume: Executed) -> None:
    lines = [data["text/plain"] for data in resume.displays("three_workers")]
    step = resume.facts()["first"]["3"] - 1
    (line,) = [line for line in lines if line.startswith("resumed")]
    assert f"resumed step {step} from" in line
    assert f"step_{step}" in line
    assert "samples left" in line
    assert "1 -> 3 workers" in line
    assert any(line.startswith("saved step") for line in lines)


@pytest.mark.nightly
def test_five_ways_are_one_training(bigger_than_memory: Executed) -> None:
    facts = bigger_than_memory.facts()
    assert bigger_than_memory.errors() == {}
    assert list(facts["losses"]) == ["ddp", "fsdp", "zero 1", "zero 2", "zero 3"]
    assert {len(losses) for losses in facts["losses"].values()} == {45}
    assert facts["apart"] < 1e-3
    assert facts["losses"]["ddp"][-1] < 0.5 * facts["losses"]["ddp"][0]
    assert max(facts["accuracy"].values()) - min(facts["accuracy"].values()) < 0.02
    assert "deepspeed" in bigger_than_memory.displays("zero_two")[0]["text/plain"]


@pytest.mark.nightly
def test_five_ways_hold_more_and_less(bigger_than_memory: Executed) -> None:
    held = {name: workers[0] for name, workers in bigger_than_memory.facts()["held"].items()}
    whole = held["ddp"]
    for name, parts in {"zero 2": ("gradients",), "zero 3": ("gradients", "parameters"), "fsdp": whole}.items():
        for part in parts:
            assert held[name][part] < 0.6 * whole[part], (name, part)
    assert any("image/png" in data for data in bigger_than_memory.displays("memory"))


@pytest.mark.nightly
def test_training_goes_on_when_a_machine_is_lost(machines: Executed) -> None:
    assert machines.errors() == {}
    connected, remaining = (machines.text(cell).splitlines() for cell in ("connect", "remaining"))
    assert [line.split()[1] for line in connected[1:]] == ["localhost", "localhost-2"]
    assert "lost: the process that starts its workers has ended" in remaining[2]
    shown = [machines.text("go_on"), *(data["text/plain"] for data in machines.displays("go_on"))]
    lines = [line for text in shown for line in text.splitlines()]
    assert any("node localhost-2 was lost" in line and "and ranks 2 and 3 with it" in line for line in lines)
    (line,) = [line for line in lines if line.startswith("resumed step")]
    assert "4 -> 2 workers · exact: weights, optimizer, order of samples" in line
    facts = machines.facts()
    assert facts["accuracy"] > 0.93
    assert not facts["left"]


@pytest.mark.nightly
def test_every_mesh_prints_the_losses_of_one_device(dimensions: Executed) -> None:
    facts = dimensions.facts()
    assert dimensions.errors() == {}
    printed = dimensions.text("lines").strip()
    cells = ("layers", "stages", "sequences")
    assert [dimensions.text(cell).strip().splitlines()[-1] for cell in cells] == [printed] * 3
    alone = facts["losses"].pop("alone")
    assert alone[-1] < alone[0] - 1
    for name, losses in facts["losses"].items():
        assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < 1e-5, name
    assert facts["weights"] < 1e-3
    receipts = [dimensions.displays(cell)[0]["text/plain"] for cell in cells]
    for receipt, mesh in zip(receipts, ("dp_replicate 2 x tp 2", "pp 2 x tp 2", "dp_replicate 2 x cp 2"), strict=True):
        assert f"mesh {mesh} (rank 3 is" in receipt
    assert "ddp x tp 2" in dimensions.text("plan")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_big_model_generates_under_a_limit_below_its_size(big_model: Executed) -> None:
    facts = big_model.facts()
    assert big_model.errors() == {}
    assert facts["limit"] < 0.45 * facts["size"]
    assert "the model as a whole:" in big_model.text("set_limit")  # the system refused it
    assert facts["away"] > 0.7 * facts["size"]
    assert facts["text"].startswith("Once upon a time")
    assert len(facts["text"]) == len("Once upon a time") + 12
    assert "the same text: True" in big_model.text("compare")
    assert facts["same"]
    assert not facts["left"]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_big_model_is_forecast(big_model: Executed) -> None:
    [shown] = big_model.displays("load")
    reported = shown["text/plain"]
    assert reported.splitlines()[0].split() == ["device", "limit", "weights", "filled", "parts"]
    assert shown["text/html"].count("height: 100%") == 2, "a bar for memory and one for disk"
    assert "130" in reported or "124" in reported  # the limit, in MB or MiB
    assert re.search(r"each forward moves \d+\.\d MiB from disk to cpu", reported)


@pytest.mark.parametrize("name", RUN_TWICE)
def test_the_training_cell_keeps_a_picture(name: str, request: pytest.FixtureRequest) -> None:
    executed = request.getfixturevalue(name)
    assert any("image/png" in data for data in executed.displays("train"))


@pytest.mark.parametrize("name", RUN_TWICE)
def test_nothing_warns(name: str, request: pytest.FixtureRequest) -> None:
    outputs = [output for cell in request.getfixturevalue(name).notebook.cells for output in cell.get("outputs", ())]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []


@pytest.mark.parametrize("name", RUN_TWICE)
def test_no_process_outlives_the_kernel(name: str, request: pytest.FixtureRequest) -> None:
    pids = request.getfixturevalue(name).pids()
    assert len(pids) == 3  # the process that workers are forked from, and two workers
    assert wait_for(lambda: ended(pids))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_are_valid_and_named(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    idents = [cell.id for cell in notebook.cells]
    assert len(set(idents)) == len(idents)
    assert all(re.fullmatch(r"[a-z_]+", ident) for ident in idents), "give cells names, not random ids"


def test_committed_notebooks_hold_no_outputs(project: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(project / ".ci" / "strip_outputs.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_stripping_finds_an_output(project: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    code = next(cell for cell in notebook.cells if cell.cell_type == "code")
    code.outputs, code.execution_count = [nbformat.v4.new_output("stream", text="hello")], 3
    path = tmp_path / "dirty.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, str(project / ".ci" / "strip_outputs.py")]
    checked = subprocess.run([*command, "--check", str(path)], capture_output=True, text=True, check=False)
    assert (checked.returncode, "holds outputs" in checked.stdout) == (1, True)
    subprocess.run([*command, str(path)], capture_output=True, check=True)
    assert path.read_bytes() == NOTEBOOKS[0].read_bytes()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A notebook that needs no worker."""
    path = tmp_path / "small.ipynb"
    source = 'from IPython.display import Image, display\nimport base64\nprint("accuracy: 100%")\n' + (
        'display(Image(base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJg'
        'gg==")))'
    )
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)]), path)
    return path


def test_demo_runs_a_notebook_and_extracts_pictures(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("small-2.png", "small-of-mine.png"):
        (out / name).touch()
    assert main(["demo", "--notebook", str(small), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in out.glob("*.png")) == ["small-1.png", "small-of-mine.png"]
    assert "accuracy: 100%" in printed
    assert "run time" in printed
    assert (out / "small-1.png").read_bytes().startswith(b"\x89PNG")
    assert nbformat.read(out / "small.ipynb", as_version=4).cells[0].execution_count == 1


def test_demo_fails_with_the_error_of_the_notebook(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(notebook, small)
    assert main(["demo", "--notebook", str(small), "--out", str(tmp_path / "out")]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert (tmp_path / "out" / "small.ipynb").exists()


def test_demo_says_what_to_do_when_the_notebook_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "QUICKSTART", Path("notebooks/missing.ipynb"))
    assert main(["demo"]) == 1
    assert "--notebook PATH" in capsys.readouterr().err
    assert main(["demo", "--notebook", "missing.ipynb"]) == 1
    assert main(["demo", "--notbook", "missing.ipynb"]) == 2
    assert not list(tmp_path.iterdir())


def test_demo_does_not_overwrite_its_source(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--notebook", str(small), "--out", str(small.parent)]) == 2
    assert "overwrite" in capsys.readouterr().err
