"""Every platform by its signals, with the traps; what the doctor says there; what a launch refuses."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import EntryPoint, PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from accel_nb.accelerator import Accelerator
from accel_nb.cli.main import main
from accel_nb.config import parse_flags, resolve
from accel_nb.config.schema import STRATEGY_GROUP
from accel_nb.errors import ConfigError, PoolError
from accel_nb.notebook.reports.doctor import diagnose
from accel_nb.pool.device_assignment import DeviceReservations, assign_devices
from accel_nb.pool.engine import WorkerSpec
from accel_nb.runtime import torch_private
from accel_nb.runtime.process import tested_versions
from accel_nb.runtime.process.hardware import (
    Gpu,
    count_tpu_chips,
    inspect_machine,
    torch_cuda_version,
    why_no_xla,
    why_unusable,
)
from accel_nb.runtime.process.platforms import PLATFORMS, PlatformSignals, detect_platform, find_tpu
from accel_nb.runtime.process.requirements import unmet_extra
from accel_nb.strategies import StrategyRegistry
from accel_nb.ui.fallback import DisplayFacts, choose_display

KERNEL = frozenset({"ipykernel"})


def signals(
    *variables: str, modules: Iterable[str] = KERNEL, paths: Iterable[str] = (), **others: Any
) -> PlatformSignals:
    return PlatformSignals(
        dict.fromkeys(variables, "x"), frozenset(modules), has_path=lambda path: path in paths, **others
    )


@pytest.mark.parametrize(
    ("here", "name"),
    [
        (signals("KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"), "kaggle"),
        (signals("COLAB_RELEASE_TAG", paths=["/kaggle/input"]), "kaggle"),
        (signals("KAGGLE_USERNAME", "KAGGLE_KEY"), "jupyter"),
        (signals("COLAB_RELEASE_TAG"), "colab"),
        (signals(modules={"ipykernel", "google.colab"}), "colab"),
        (signals("COLAB_RELEASE_TAG", modules=()), "colab"),
        (signals("DEEPNOTE_PROJECT_ID"), "deepnote"),
        (signals("DEEPNOTE_PROJECT_ID", modules=()), "script"),
        (signals("PAPERSPACE_NOTEBOOK_REPO_ID"), "paperspace"),
        (signals(home="/home/studio-lab-user"), "studiolab"),
        (signals("SAGEMAKER_INTERNAL_IMAGE_URI"), "sagemaker"),
        (signals("DATABRICKS_RUNTIME_VERSION"), "databricks"),
        (signals("VSCODE_PID"), "vscode"),
        (signals(names=frozenset({"__vsc_ipynb_file__"})), "vscode"),
        (signals("VSCODE_PID", modules=()), "script"),
        (signals(parent="/usr/bin/python /usr/bin/papermill in.ipynb out.ipynb"), "headless"),
        (signals(parent="python -m nbconvert --execute x.ipynb"), "headless"),
        (signals("JPY_SESSION_NAME", parent="python -m jupyterlab"), "jupyter"),
        (signals(modules=()), "script"),
    ],
)
def test_a_platform_is_detected_by_its_signals(here: PlatformSignals, name: str):
    assert detect_platform(here).name == name


def test_every_platform_of_the_table_is_tested():
    rows = test_a_platform_is_detected_by_its_signals.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {name for _, name in rows} == {platform.name for platform in PLATFORMS}


@pytest.mark.parametrize("platform", PLATFORMS, ids=lambda platform: platform.name)
def test_the_panel_takes_the_rung_of_the_table(platform):
    facts = DisplayFacts(
        platform.name, platform.name != "script", frozenset({"anywidget", "ipywidgets", "matplotlib"}), True
    )
    assert choose_display(facts, "live") == platform.display_mode


@pytest.mark.parametrize(
    ("here", "tpu"),
    [
        (PlatformSignals({"TPU_ACCELERATOR_TYPE": "v5e-8"}, has_path=lambda _: False), "v5e-8"),
        (PlatformSignals({"PJRT_DEVICE": "TPU"}, has_path=lambda _: False), "TPU"),
        (PlatformSignals({}, has_path=lambda path: path == "/dev/accel0"), "TPU"),
        (signals("COLAB_RELEASE_TAG", num_tpu_chips=1), "TPU"),
        (
            PlatformSignals({"PJRT_DEVICE": "CPU", "COLAB_TPU_ADDR": "x", "TPU_NAME": "y"}, has_path=lambda _: False),
            None,
        ),
    ],
)
def test_a_tpu_is_detected_by_the_runtime_of_today(here: PlatformSignals, tpu: str | None):
    assert find_tpu(here) == tpu


def test_tpu_chips_are_counted_on_the_bus_and_other_devices_of_their_maker_are_not(tmp_path: Path):
    for place, (vendor, kind) in enumerate([("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x10de", "0x0063")]):
        (device := tmp_path / f"0000:00:0{place}.0").mkdir()
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "device").write_text(f"{kind}\n")
    (tmp_path / "0000:00:09.0").mkdir()
    assert count_tpu_chips(str(tmp_path)) == 1


@pytest.mark.parametrize(
    ("torch", "torch_xla", "parts"),
    [
        ("2.9.1+cpu", "2.9.0", ()),
        ("2.13.0+cpu", "2.9.0", ("torch_xla 2.9.0", "torch 2.9 only", "torch 2.13.0+cpu", "'torch==2.9.*'")),
        ("2.10.0", "2.1.0", ("torch 2.1 only", "torch 2.10.0 is installed")),
    ],
)
def test_torch_and_torch_xla_are_a_pair_or_distinguished(torch: str, torch_xla: str, parts: tuple[str, ...]):
    why = why_no_xla(torch, torch_xla)
    assert (why is None) == (not parts)
    assert [part for part in parts if part not in (why or "")] == []


def gpu(name: str, capability: tuple[int, int]) -> Gpu:
    return Gpu(0, name, 16 * 2**30, 16 * 2**30, capability)


P100, T4, H100 = gpu("Tesla P100-PCIE-16GB", (6, 0)), gpu("Tesla T4", (7, 5)), gpu("H100", (9, 0))


def test_a_device_that_torch_has_no_code_for_is_named_with_the_way_out():
    why = why_unusable(P100, (12, 8))
    assert why is not None
    assert "compute capability 6.0" in why
    assert "GPU T4 x2" in why
    assert [why_unusable(device, (12, 8)) for device in (T4, H100)] == [None, None]
    assert why_unusable(P100, (12, 6)) is None
    assert "build for CPUs" in (why_unusable(T4, None) or "")


def test_the_build_of_torch_is_read_without_importing_it():
    import torch

    found = torch.version.cuda
    assert torch_cuda_version() == (None if found is None else tuple(map(int, found.split(".")[:2])))


def test_the_doctor_says_what_a_platform_and_its_devices_mean():
    machine = replace(inspect_machine(), gpus=(P100, T4))
    lines = "\n".join(map(str, diagnose(machine, signals("KAGGLE_KERNEL_RUN_TYPE"))))
    for part in ("platform: Kaggle", "panel: core widget", "not P100", "only emulates bf16", "GPU 0 (Tesla P100"):
        assert part in lines
    lines = "\n".join(map(str, diagnose(machine, PlatformSignals({"TPU_ACCELERATOR_TYPE": "v3-8"}, KERNEL))))
    assert (why := why_no_xla()) is not None
    assert f"[WARN] v3-8: {why}; or use --cpus N" in lines


def test_the_doctor_looks_at_a_folder_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("long" * 100)))
    assert diagnose()


def test_the_doctor_says_where_checkpoints_outlive_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def storage(name: str, here: PlatformSignals, **changes: Any) -> str:
        table = [replace(row, **changes) if row.name == name else row for row in PLATFORMS]
        monkeypatch.setattr("accel_nb.runtime.process.platforms.PLATFORMS", tuple(table))
        return next(str(line) for line in diagnose(signals=here) if "the session" in line.text and "/" in line.text)

    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "weights").write_bytes(bytes(1000))
    kaggle = signals("KAGGLE_KERNEL_RUN_TYPE", paths=[str(tmp_path)])
    line = storage("kaggle", kaggle, kept_folder=str(tmp_path), kept_bytes=20_000_001_000)
    assert line.startswith("[  ok] 20.0 of 20 GB are left")
    line = storage("kaggle", kaggle, kept_folder=str(tmp_path), kept_bytes=2_000)
    assert line.startswith("[WARN] 0.0 of 0 GB are left")
    assert line.endswith("--checkpoint.total-limit 2")
    mounted = signals("COLAB_RELEASE_TAG", paths=["/content/drive/MyDrive"])
    assert "--checkpoint /content/drive/MyDrive/NAME" in storage("colab", mounted)
    line = storage("colab", signals("COLAB_RELEASE_TAG"))
    assert line.startswith("[WARN] /content/drive/MyDrive does not exist")
    assert line.endswith("drive.mount('/content/drive')")


def test_the_doctor_says_that_torch_is_unchecked_and_what_runs_then(monkeypatch: pytest.MonkeyPatch):
    assert "is not checked" not in "\n".join(map(str, diagnose()))
    monkeypatch.setattr(torch_private, "torch_version", lambda: "2.99")
    [line] = [str(finding) for finding in diagnose() if "is not checked" in finding.text]
    assert line.startswith("[note] torch 2.99 is not checked")
    assert "torch's own forward pass of DistributedDataParallel" in line


def test_the_doctor_warns_of_versions_newer_than_the_tested_ones(monkeypatch: pytest.MonkeyPatch):
    assert "newest tested" not in "\n".join(map(str, diagnose()))
    versions = {**dict.fromkeys(tested_versions.tested_versions(), "0.1"), "ipykernel": "99.1.2", "torch": "2.13.9+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    [line] = [str(finding) for finding in diagnose() if "newest tested" in finding.text]
    assert line.startswith("[WARN] ipykernel 99.1.2 is newer than the newest tested version: ")
    assert f"pip install ipykernel=={tested_versions.tested_versions()['ipykernel'][-1]}" in line


def test_packages_of_an_extra_that_are_missing_or_too_old_are_named_with_its_command(monkeypatch: pytest.MonkeyPatch):
    versions = {"torchao": "0.10.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    explain = unmet_extra.__wrapped__  # without its cache
    words = r"torchao>=[\d.]+ is needed, and 0\.10\.0 is installed: pip install 'accel_nb\[quantize\]'"
    assert re.fullmatch(words, explain("quantize", "torchao") or "")
    assert "and it is not installed" in (explain("quantize", "bitsandbytes") or "")
    versions["torchao"] = "99.0"
    assert explain("quantize", "torchao") is None


def test_the_command_line_has_a_doctor(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor"]) == 0
    assert "platform: a script" in capsys.readouterr().out
    assert main(["doctor", "now"]) == 2


def test_a_launch_refuses_what_cannot_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-8")
    if not inspect_machine().gpus:
        with pytest.raises(ConfigError, match=r"v5e-8: torch_xla is not installed: .*; or use --cpus N"):
            assign_devices(None, None)
    assert len(assign_devices(None, 2)) == 2


def test_a_tpu_is_asked_for_by_its_flag(monkeypatch: pytest.MonkeyPatch):
    def refusal(line: str) -> str:
        config = resolve([parse_flags(line)]).config
        with pytest.raises(ConfigError) as raised:
            assign_devices(config.gpus, config.cpus, config.tpus)
        return str(raised.value)

    assert refusal("--tpus all") == "--tpus all was requested and no TPU is visible; use --gpus N or --cpus N"
    with pytest.raises(ConfigError, match="tpus"):
        resolve([parse_flags("--tpus 4 --cpus 2")])
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-8")
    assert refusal("--tpus all").startswith("v5e-8: torch_xla is not installed")
    monkeypatch.setattr("accel_nb.pool.device_assignment.why_no_xla", lambda: None)  # as on a TPU's machine
    assert refusal("--tpus 4") == (
        "--tpus 4: one worker drives all chips of the v5e-8, and how many are there is not known before the device is "
        "opened; use --tpus all"
    )
    assert [spec.device for spec in assign_devices(None, None, "all")] == ["xla"]


def test_an_accelerator_does_not_train_past_a_tpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-8")
    points = {"single": "accel_nb.strategies.single:Single", "xla": "accel_nb.strategies.xla:Xla"}
    registry = StrategyRegistry([EntryPoint(name, place, STRATEGY_GROUP) for name, place in points.items()])
    if not inspect_machine().gpus:
        with pytest.raises(ConfigError, match=r"on xla \(single: .* not on xla; xla: torch_xla is not installed: "):
            Accelerator(registry=registry)
    accelerator = Accelerator(cpu=True, registry=registry)
    assert accelerator.device.type == "cpu"
    accelerator.close()


def test_launches_at_once_hold_gpus_one_after_the_other():
    claims, seen = DeviceReservations(), []

    def place(taken: int) -> tuple[WorkerSpec, ...]:
        seen.append(taken)
        return (WorkerSpec("cuda:0", 1), WorkerSpec("cuda:1", 1))

    with claims.reserving_next(place) as (_, first), claims.reserving_next(place) as (_, second):
        assert (first, second) == (0, 2)
        with claims.reserving_next(lambda taken: (WorkerSpec("cpu", 1),)) as (_, third):
            assert third == 4
    with claims.reserving_next(place):
        pass
    assert seen == [0, 2, 0]


def test_a_cell_and_launches_never_share_gpus():
    claims = DeviceReservations()
    two = tuple(WorkerSpec(f"cuda:{index}", 1) for index in range(2))
    give_back = claims.reserve_first(two)  # a run in the background
    with claims.reserving_next(lambda taken: two[:1]) as (_, first):
        assert first == 2
        with pytest.raises(PoolError, match=r"GPU 0 is in use by a launch that runs now; wait until it has ended$"):
            claims.reserve_first(two)
        give_back()
        claims.reserve_first(two)()
        claims.reserve_first((WorkerSpec("cpu", 1),))()
        with pytest.raises(PoolError, match=r"GPU 2 is in use .* or use --gpus 2$"):
            claims.reserve_first((*two, WorkerSpec("cuda:2", 1)))
