"""Messages between the kernel and the sidebar."""

from __future__ import annotations

import json
import logging
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comm
import pytest

from accel_nb.config import OPTIONS, parse_flags, resolve
from accel_nb.notebook.output.rank_logs import HEAD_BYTES, TAIL_BYTES, RankLog
from accel_nb.notebook.reports.recent_runs import MAX_POINTS, flags_of_run
from accel_nb.notebook.session.engines import start_engine
from accel_nb.notebook.session.session import Session
from accel_nb.notebook.sidebar import NOTEBOOK_SOURCE, NotebookSettings, describe_state, request_handlers
from accel_nb.runs import Run, RunRegistry
from accel_nb.runtime.process.hardware import inspect_machine
from accel_nb.telemetry.events import EpochBegan, StepDone
from accel_nb.ui.comm import TARGET, SidebarComm
from accel_nb.ui.panel import Panel
from accel_nb.ui.progress import LoopPlan
from tests.conftest import wait_for


class Line(comm.base_comm.BaseComm):
    """A comm to a browser that keeps what it is sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)

    def publish_msg(self, msg_type: str, data: Any = None, **_: Any) -> None:
        self.sent.append({"type": msg_type, **(data or {})})

    def say(self, **data: Any) -> dict[str, Any]:
        """Send the kernel a message and return its last reply."""
        self.handle_msg({"content": {"data": data}})
        return self.sent[-1]


@pytest.fixture
def session() -> Session:
    return Session({}, start_engine)


@pytest.fixture
def sidebar(session: Session, monkeypatch: pytest.MonkeyPatch):
    manager = comm.base_comm.CommManager()
    monkeypatch.setattr(comm, "create_comm", Line)
    monkeypatch.setattr(comm, "get_comm_manager", lambda: manager)
    shell = SimpleNamespace(kernel=SimpleNamespace(comm_manager=manager))
    answers = request_handlers(session, NotebookSettings(session))
    sidebar = SidebarComm(shell, lambda: describe_state(session), answers)
    yield sidebar
    sidebar.close()


@pytest.fixture
def line(sidebar: SidebarComm) -> Line:
    line = Line(target_name=TARGET, primary=False)
    comm.get_comm_manager().register_comm(line)
    sidebar._on_open(line, {})
    return line


class OwnManager:
    """The comm manager of an ipykernel that does not use the package ``comm``."""

    def __init__(self) -> None:
        self.targets: dict[str, Any] = {}

    def register_target(self, name: str, opened: Any) -> None:
        self.targets[name] = opened

    def unregister_target(self, name: str, opened: Any) -> None:
        assert self.targets.pop(name) == opened


class OwnComm:
    """The comm of such a kernel: opened by being made."""

    opened: list[OwnComm] = []

    def __init__(self, target_name: str, data: dict[str, Any]) -> None:
        self.target_name, self.comm_id, self.sent, self.is_closed = target_name, "7", [data], False
        self.opened.append(self)

    def on_msg(self, callback: Any) -> None:
        self.take = callback

    def on_close(self, callback: Any) -> None:
        self.closed = callback

    def send(self, data: dict[str, Any]) -> None:
        self.sent.append(data)

    def close(self) -> None:
        self.is_closed = True


def test_comms_are_those_of_the_kernel_where_it_has_its_own(session: Session, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ipykernel.comm", SimpleNamespace(Comm=OwnComm))  # type: ignore[arg-type]
    monkeypatch.setattr(OwnComm, "opened", [])
    monkeypatch.setattr(comm, "create_comm", Line)
    manager = OwnManager()
    shell = SimpleNamespace(kernel=SimpleNamespace(comm_manager=manager))
    sidebar = SidebarComm(shell, lambda: describe_state(session))
    (opened,) = OwnComm.opened
    assert opened.target_name == TARGET
    assert opened.sent[0]["kind"] == "state"
    opened.take({"content": {"data": {"kind": "refresh"}}})
    assert [message["kind"] for message in opened.sent] == ["state", "state"]
    sidebar.close()
    assert opened.is_closed
    assert not manager.targets


def test_without_a_comm_there_is_no_sidebar_and_no_error(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "comm", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ipykernel.comm", None)  # type: ignore[arg-type]
    shell = SimpleNamespace(kernel=SimpleNamespace(comm_manager=OwnManager()))
    with caplog.at_level(logging.WARNING, "accel_nb"):
        sidebar = SidebarComm(shell, lambda: describe_state(session))
    assert "the JupyterLab sidebar is off" in caplog.text
    assert not sidebar.expects_browser
    sidebar.push()
    sidebar.close()


def ask(to: Line, about: str, **given: Any) -> dict[str, Any]:
    return to.say(kind="request", id=7, topic=about, arguments=given)


def test_the_kernel_opens_a_comm_and_sends_the_state(sidebar: SidebarComm, line: Line):
    (called,) = [known for known in sidebar._comms.values() if known is not line]
    assert called.sent[0]["type"] == "comm_open"
    assert called.sent[0]["pool"] == line.sent[0]["pool"] == {"state": "not started", "workers": []}
    assert line.say(kind="refresh")["devices"][-1]["kind"] == "cpu"


def test_options_are_resolved_with_origins(line: Line, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ACCEL_NB_PRECISION", "bf16")
    answer = ask(line, "options", line="--cpus 2 --clip 1.5", settings={"seed": "3", "clip": "9"})
    rows = {row["option"]: row for row in answer["body"]["rows"]}
    assert set(rows) == set(OPTIONS)
    assert (rows["seed"]["value"], rows["seed"]["source"]) == ("3", NOTEBOOK_SOURCE)
    assert (rows["clip"]["value"], rows["clip"]["layer"]) == ("1.5", "flags")
    assert (rows["precision"]["layer"], rows["accumulate"]["layer"]) == ("environment", "default")
    assert answer["body"]["devices"] == ["cpu", "cpu"]


def test_problems_of_line_and_settings_name_the_nearest_options(line: Line):
    body = ask(line, "options", line="--precison bf16", settings={"sed": "1", "clip": "-1"})["body"]
    assert any("did you mean --precision" in problem for problem in body["problems"])
    assert any("did you mean seed" in problem and NOTEBOOK_SOURCE in problem for problem in body["problems"])
    assert any(problem.startswith("clip: -1") for problem in body["problems"])


def test_settings_are_a_layer_of_the_session(line: Line, session: Session):
    assert ask(line, "notebook", settings={"seed": "3"})["kind"] == "answer"
    (layer,) = session.notebook_layers
    assert (layer.name, layer.values, layer.source) == ("notebook", {"seed": "3"}, NOTEBOOK_SOURCE)
    ask(line, "notebook", settings={})
    assert session.notebook_layers == ()
    assert ask(line, "notebook", settings=["forged"])["kind"] == "refusal"


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "stop"},
        {"kind": "request", "id": 1, "topic": "__class__", "arguments": {}},
        {"kind": "request", "id": "1", "topic": "log", "arguments": {}},
        {"kind": "request", "id": 1, "topic": "log", "arguments": []},
        {"kind": "watch", "on": "yes"},
        {},
    ],
)
def test_unknown_messages_are_counted_and_dropped(sidebar: SidebarComm, line: Line, data: dict[str, Any]):
    num_sent = len(line.sent)
    line.handle_msg({"content": {"data": data}})
    assert (len(line.sent), sidebar.num_dropped) == (num_sent, 1)


def test_the_log_is_sent_from_the_byte_that_the_browser_has_seen(line: Line, session: Session):
    log = session.logs[0] = RankLog()
    log.write("one\nzw\u00f6".encode()[:-1])
    first = ask(line, "log", rank=0, log="", seen=0)["body"]
    assert (first["text"], first["end"]) == ("one\nzw", 6)  # half a character waits
    log.write("\u00f6\n".encode()[1:])
    second = ask(line, "log", rank=0, log=log.name, seen=first["end"])["body"]
    assert (second["text"], second["start"]) == ("\u00f6\n", 6)
    log.write(b"x" * (HEAD_BYTES + 2 * TAIL_BYTES))
    third = ask(line, "log", rank=0, log=log.name, seen=second["end"])["body"]
    assert third["start"] == 0
    assert "bytes not kept" in third["text"]
    assert ask(line, "log", rank=5, log="", seen=0)["kind"] == "refusal"


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunRegistry:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return RunRegistry()


def test_recent_runs_are_sent_with_a_small_chart(line: Line, registry: RunRegistry):
    assert line.say(kind="refresh")["runs"] == ""
    assert ask(line, "runs")["body"] == {"runs": []}
    options = resolve([parse_flags("--cpus 2 --clip 0.5 --name 'my run'", "%%accelerate")])
    stamps = set()
    for outcome, started in (("failed", 1.7e9), ("done", 1.8e9)):
        recording = registry.begin("cell", "train()", options, started=started)
        stamps.add(line.say(kind="refresh")["runs"])
        recording.log((step, {"accuracy": 0.5, "loss": 1 / step}) for step in range(1, 1001))
        recording.finish(outcome, num_steps=1000, error="ValueError: x\n\x1b[31my", checkpoints=tuple("abcdef"))
        stamps.add(line.say(kind="refresh")["runs"])
    assert len(stamps) == 4, "each begin and each end is recorded"
    newest, older = ask(line, "runs")["body"]["runs"]
    assert (newest["outcome"], older["outcome"], newest["name"]) == ("done", "failed", "my run")
    assert (newest["metric"], newest["value"], newest["num_steps"]) == ("loss", 0.001, 1000)
    assert newest["steps"][0] == 1
    assert len(newest["steps"]) == len(newest["values"]) <= MAX_POINTS
    reported = ask(line, "run", id=older["id"])["body"]
    assert reported["error"] == "ValueError: x\n\ufffd[31my"
    assert (reported["num_checkpoints"], reported["checkpoints"]) == (6, list("cdef"))
    assert {"option": "clip", "value": "0.5", "source": "--clip 0.5 (flags)"} in reported["options"]
    assert resolve([parse_flags(reported["line"])]).given == options.given
    assert ask(line, "run", id="../../etc")["kind"] == "refusal"
    assert ask(line, "run", id=[])["kind"] == "refusal"


def test_forged_runs_are_sent_as_plain_text_without_flags(line: Line, registry: RunRegistry):
    folder = registry.folder / "20990101-000000-abcdef"
    folder.mkdir(parents=True)
    mark = "<img src=x onerror=alert(1)>\ud800\u202e\n"
    forged = Run(
        folder.name, mark * 99, "cell", mark, 1.0, config={mark: ("x", mark), "seed": ("1\n!rm -rf ~", mark)},
        environment={"packages": [mark], "folder": {mark: mark}}, git={"commit": [mark]}, checkpoints=(mark,) * 999,
        metrics={mark + str(number): 1e308 for number in range(999)},
    )  # fmt: skip
    (folder / "run.json").write_text(forged.to_json())
    rows = [{"step": 10**30, "values": {"loss": 1.0}}, {"step": 1, "values": {"loss": 1e308}}, {"step": "x"}, []]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (summary,) = ask(line, "runs")["body"]["runs"]
    assert summary["values"] == [1.0, 1e308]
    assert summary["steps"] == [2**53, 2**53], "no step goes back"
    reported = ask(line, "run", id=folder.name)["body"]
    text = json.dumps([summary, reported], ensure_ascii=False, allow_nan=False)
    assert text.encode()
    assert text.isprintable()
    assert len(text) < 64 * 1024
    assert reported["line"] is None


def test_the_flags_of_a_run_have_no_secrets_and_no_options_file():
    config = {"config": ("x.yaml", "flags"), "seed": (7, "file"), "name": ("***", "flags"), "gone": (1, "flags")}
    assert flags_of_run(Run("20990101-000000-abcdef", "x", "cell", "y", 1.0, config=config)) == "--seed 7"


def test_watching_sends_the_state_until_it_ends(sidebar: SidebarComm, line: Line, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("accel_nb.ui.comm.WATCH_S", 0.01)
    num_sent = len(line.sent)
    line.handle_msg({"content": {"data": {"kind": "watch", "on": True}}})
    sender = sidebar._sender
    assert sender is not None
    while len(line.sent) < num_sent + 2:
        sender.join(0.01)
        assert sender.is_alive()
    line.handle_msg({"content": {"data": {"kind": "watch", "on": False}}})
    sender.join(5)
    assert not sender.is_alive()


@pytest.mark.parametrize("fails", ["read", "sent"])
def test_after_a_state_that_could_not_be_read_or_sent_later_ones_are_sent(
    sidebar: SidebarComm, line: Line, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
):
    monkeypatch.setattr("accel_nb.ui.comm.WATCH_S", 0.01)
    target: tuple[Any, str] = (sidebar, "_describe") if fails == "read" else (line, "publish_msg")
    works, failed = getattr(*target), threading.Event()

    def fail(*_: Any, **__: Any) -> Any:
        failed.set()
        raise RuntimeError("not now")

    monkeypatch.setattr(*target, fail)
    line.handle_msg({"content": {"data": {"kind": "watch", "on": True}}})
    assert failed.wait(5)
    monkeypatch.setattr(*target, works)
    num_sent = len(line.sent)
    assert wait_for(lambda: len(line.sent) > num_sent)
    assert caplog.text.count("RuntimeError: not now") == 1


def test_a_query_that_fails_is_refused_with_its_error(sidebar: SidebarComm, line: Line):
    def fail(_: Any) -> Any:
        raise RuntimeError("not now")

    sidebar._answers = {"resolve": fail}
    reply = line.say(kind="request", id=3, topic="resolve", arguments={})
    assert (reply["kind"], reply["id"], reply["text"]) == ("refusal", 3, "RuntimeError: not now")


def test_a_machine_whose_working_folder_was_deleted_is_described(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert describe_state(session).devices
    assert inspect_machine().disk_free_bytes is None


def test_the_running_cell_is_described_with_its_progress(session: Session):
    assert describe_state(session).run is None
    panel = Panel("digits", 2, mode="off", plan=LoopPlan("epochs", 4))
    panel.state.apply(
        [EpochBegan(0, 0, 1.0, 10), *(StepDone(0, step, float(step), 0.5, 0.1, 1.0, 4) for step in (1, 2))]
    )
    run = SimpleNamespace(status="running", output=SimpleNamespace(panel_facts=panel.facts))
    session.last_run = run  # type: ignore[assignment]
    line = describe_state(session).run
    assert line is not None
    assert (line.title, line.step, list(line.losses)) == ("digits", 2, [{"name": "loss", "value": 0.5}])
    assert line.fraction == pytest.approx(2 / 40)
    run.status = "done"
    assert describe_state(session).run is None
