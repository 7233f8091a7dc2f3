"""Secrets: their detection, and that no output contains them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_nb import Accelerator, GeneralTracker
from accel_nb.accelerator.state.training_state import LoadReport
from accel_nb.cli.main import main
from accel_nb.config import parse_flags, resolve
from accel_nb.errors import AccelNbError, CheckpointError, ConfigError
from accel_nb.notebook.output.cell_output import ConsoleOutput
from accel_nb.pool.engine import WorkerSpec
from accel_nb.runtime.process.secrets import redact, redacted
from accel_nb.telemetry.events import CheckpointSaved
from accel_nb.ui.comm import SidebarState
from accel_nb.ui.panel import Panel

TOKEN = "hf_" + "aB3dE5" * 6
ADDRESS = "s3://someone:pa55word@store.example:9000/runs"
SAFE_ADDRESS = "s3://***@store.example:9000/runs"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a value of no known shape that only a variable's name gives away."""
    monkeypatch.setenv("LAB_SERVICE_KEY", "correct-horse-battery")
    return "correct-horse-battery"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        (f"token is {TOKEN}!", "token is ***!"),
        ("ghp_" + "a1" * 18, "***"),
        ("sk-proj-" + "x9" * 20, "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----.", "***."),
        ("-----BEGIN PRIVATE KEY-----\nMIIE and it is cut", "***"),
        (ADDRESS, SAFE_ADDRESS),
        ("https://only-a-token@host/x and ssh://git@host", "https://***@host/x and ssh://***@host"),
        ("Authorization: Bearer abcdefgh.ijk", "Authorization: Bearer ***"),
        ("train.py --hub-token abc123 --lr 0.1", "train.py --hub-token *** --lr 0.1"),
        ("train.py --api-key=abc", "train.py --api-key=***"),
        ("https://h/x?sig=1&token=abc&step=3", "https://h/x?sig=1&token=***&step=3"),
        ('{"password": "hunter2", "lr": 0.1}', '{"password": "***", "lr": 0.1}'),
        ("login(token='abc')", "login(token='***')"),
        ("https://hooks.slack.com/services/T0/B0/xyz'", "https://hooks.slack.com/services/***'"),
        ("https://discord.com/api/webhooks/1/a-b", "https://discord.com/api/webhooks/***"),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY=***"),
    ],
)
def test_secrets_are_hidden(text: str, hidden: str) -> None:
    assert redact(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "lr=0.1, use_cls_token=True, max_new_tokens=128",
        'pad_token="<pad>", cls_token="[CLS]"',
        "next token: the one with the highest logit",
        "token = next(tokens)",
        "https://host:8080/path?step=3#x",
        "me@example.com",
        "a commit 668556b0f0d4c1d5a7c6e8f9a0b1c2d3e4f5a6b7",
        "disk-usage sk-short hf_model",
        "key=value sort_key=name",
    ],
)
def test_other_texts_are_unchanged(text: str) -> None:
    assert redact(text) == text


def test_variables_named_like_secrets(secret: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "short")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "a-long-value")
    text = f"{secret} short {tmp_path} a-long-value"
    assert redact(text) == f"*** short {tmp_path} a-long-value"


def test_values_are_hidden_by_their_names_at_any_depth(secret: str) -> None:
    given = {
        "lr": 0.1,
        "api_key": "x",
        "use_cls_token": True,
        "pad_token": "<pad>",
        "bos_token_id": 1,
        "hub": [{"hf_token": "y", "url": ADDRESS}, ("z", secret)],
        "passwords": None,
    }
    assert redacted(given) == {
        "lr": 0.1,
        "api_key": "***",
        "use_cls_token": True,
        "pad_token": "<pad>",
        "bos_token_id": 1,
        "hub": [{"hf_token": "***", "url": SAFE_ADDRESS}, ("z", "***")],
        "passwords": None,
    }
    assert given["api_key"] == "x", "the run's own values are left alone"


@pytest.mark.parametrize("piece", ["://", "token=", "hf_", "-----BEGIN PRIVATE KEY-----", "a_", "--", "eyJ."])
def test_long_hostile_texts_take_linear_time(piece: str) -> None:
    text = piece * (400_000 // len(piece))
    assert len(redact(text)) <= 2 * len(text)


# --- each place that text leaves by ---


class Keeping(GeneralTracker):
    name = "keeping"

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.calls.append(values)
        if "bad" in values:
            raise OSError(f"401 for {ADDRESS}")


def test_trackers_receive_no_secrets_and_their_errors_show_none(secret: str, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Keeping()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("run", {"data": ADDRESS, "note": f"with {TOKEN}", "wandb_token": "x"})
    accelerator.log({"note": f"saw {secret}", "loss": 0.5})
    with caplog.at_level(logging.WARNING):
        accelerator.log({"bad": 1})
        accelerator.end_training()
    assert tracker.calls[:2] == [
        {"data": SAFE_ADDRESS, "note": "with ***", "wandb_token": "***"},
        {"note": "saw ***", "loss": 0.5},
    ]
    assert SAFE_ADDRESS in caplog.text
    assert "pa55word" not in caplog.text


def test_checkpoints_store_no_secrets_of_the_options(tmp_path: Path, secret: str) -> None:
    accelerator = Accelerator(cpu=True, config={"name": TOKEN})
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path / "one"))
    accelerator.close()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["config"]["name"] == "***"
    assert TOKEN.encode() not in written
    assert secret.encode() not in written


def test_reports_of_checkpoints_show_no_secrets() -> None:
    assert SAFE_ADDRESS in str(LoadReport(ADDRESS, 3, 1, 1))


@pytest.mark.parametrize("kind", [AccelNbError, CheckpointError, ConfigError])
def test_errors_show_no_secrets(kind: type[Exception]) -> None:
    error = kind(f"{ADDRESS}/step_3 cannot be read with {TOKEN}")
    assert str(error) == f"{SAFE_ADDRESS}/step_3 cannot be read with ***"


def test_messages_about_wrong_options_show_no_secrets() -> None:
    long = "https://user:" + "p" * 80 + "@host/x"
    with pytest.raises(ConfigError) as raised:
        resolve([parse_flags(f"--cpus {long} --precision {TOKEN} --every {ADDRESS}")])
    said = str(raised.value) + "".join(raised.value.problems)
    assert "ppp" not in said
    assert TOKEN not in said
    assert "pa55word" not in said


def test_the_table_of_options_shows_no_secrets() -> None:
    assert "pa55word" not in resolve([parse_flags(f"--checkpoint {ADDRESS}")]).table()


def test_the_command_line_prints_no_secrets(capsys: pytest.CaptureFixture[str], secret: str) -> None:
    assert main(["config", "show", "--name", secret]) == 0
    assert main(["checkpoint", "inspect", f"/nowhere/{secret}"]) == 2
    assert main([f"--token={TOKEN}"]) == 2
    said = "".join(capsys.readouterr())
    assert secret not in said
    assert TOKEN not in said
    assert "***" in said


def test_lines_below_a_cell_show_no_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    output = ConsoleOutput([WorkerSpec("cpu", 1)], panel=Panel("run", 1, mode="off"), shown_ranks=[0], is_new=False)
    output.on_output(0, "stdout", f"mine: {secret}\n".encode())
    output.finish("done", [f"resumed step 3 from {ADDRESS}", f"left out: {secret}"])
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"resumed step 3 from {SAFE_ADDRESS}", "left out: ***"]
    assert said.out == f"mine: {secret}\n", "what a cell prints is the user's"


def test_the_sidebar_receives_no_secrets(secret: str) -> None:
    assert SidebarState([], "ready", notes=[f"kept: {secret}"]).message()["notes"] == ["kept: ***"]


def test_the_events_of_a_run_contain_no_secrets(tmp_path: Path) -> None:
    events: list[Any] = []

    class Sink:
        def emit(self, event: Any) -> None:
            events.append(event)

    accelerator = Accelerator(cpu=True, sink=Sink())
    model = torch.nn.Linear(2, 1)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(str(tmp_path / TOKEN))
    accelerator.close()
    assert [event.url for event in events if isinstance(event, CheckpointSaved)] == [f"{tmp_path}/***"]
