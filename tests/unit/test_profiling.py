import json

import pytest
import torch

from accel_nb.accelerator import Accelerator
from accel_nb.errors import MisuseError


def test_a_trace_is_written_for_the_rank(tmp_path):
    with Accelerator(cpu=True).profile(tmp_path / "new" / "folder", activities=["cpu"], record_shapes=True) as profiler:
        torch.ones(3) @ torch.ones(3)

    trace = json.loads((tmp_path / "new" / "folder" / "trace_rank0.json").read_text())
    assert any("aten::" in str(event.get("name")) for event in trace["traceEvents"])
    assert any("aten::" in row.key for row in profiler.key_averages())


def test_each_cycle_of_a_schedule_writes_a_trace(tmp_path):
    ready = []
    schedule = {"wait": 1, "active": 1, "repeat": 2}
    with Accelerator(cpu=True).profile(tmp_path, schedule_option=schedule, on_trace_ready=ready.append) as profiler:
        for _ in range(4):
            torch.ones(3).sum()
            profiler.step()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace_rank0_step2.json", "trace_rank0_step4.json"]
    assert len(ready) == 2


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Accelerator(cpu=True).profile():
        torch.ones(3).sum()
    assert list(tmp_path.iterdir()) == []


def test_bad_folders_activities_and_schedules_are_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    (tmp_path / "file").touch()
    with pytest.raises(MisuseError, match="cannot be written"), accelerator.profile(tmp_path / "file"):
        pass
    with pytest.raises(MisuseError, match="no activity 'gpu'; it has cpu"), accelerator.profile(activities=["gpu"]):
        pass
    with (
        pytest.raises(MisuseError, match="no waits; it has skip_first"),
        accelerator.profile(schedule_option={"waits": 1}),
    ):
        pass
