"""Notifications of the end of a run: what a server and a program receive, and that a failure only logs."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from accel_nb.config import Layer, resolve
from accel_nb.config.sections import NotifyOptions
from accel_nb.errors import ConfigError
from accel_nb.runs.notification import RunEnd, notify

END = RunEnd("digits", "done", 3725.0, 1200, {"loss": 0.031251, "accuracy": float("nan")})


class Receiver(HTTPServer):
    """An HTTP server on loopback that keeps what is posted."""

    status: int | None = 200

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Receiver)
        size = int(self.headers["Content-Length"])
        self.server.posted.append(json.loads(self.rfile.read(size)))
        if self.server.status is None:
            self.wfile.write(b"no answer of HTTP\r\n")
            return
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def sent(end: RunEnd, **options: Any) -> None:
    sender = notify(end, NotifyOptions(**options))
    assert sender is not None
    sender.join()


def test_a_server_receives_the_end_as_one_object(receiver: Receiver):
    sent(END, url=receiver.url)
    (posted,) = receiver.posted
    assert posted["text"] == "digits done after 1 h 2 min, 1,200 steps, loss 0.03125, accuracy nan"
    assert posted["content"] == posted["text"]
    assert posted["metrics"] == {"loss": 0.031251, "accuracy": "nan"}
    assert (posted["outcome"], posted["duration_s"], posted["error"]) == ("done", 3725.0, None)


def test_a_program_gets_the_text_and_the_object(tmp_path: Path):
    program = tmp_path / "my program.py"
    program.write_text(
        "import json, pathlib, sys\n"
        f"pathlib.Path({str(tmp_path / 'out')!r}).write_text(json.dumps([sys.argv[1:], json.load(sys.stdin)]))\n"
    )
    failed = RunEnd("digits", "failed", 61.0, error="ValueError: no\nsecond line; token hf_" + "x" * 34)
    sent(failed, command=f"{sys.executable} '{program}' --now")
    words, found = json.loads((tmp_path / "out").read_text())
    assert words == ["--now", "digits failed after 1 min 1 s, ValueError: no"]
    assert found["error"] == "ValueError: no\nsecond line; token ***"


def test_short_runs_and_runs_without_a_receiver_are_not_notified(receiver: Receiver):
    assert notify(RunEnd("x", "done", 59.0), NotifyOptions(url=receiver.url)) is None
    assert notify(END, NotifyOptions()) is None
    sent(RunEnd("x", "done", 1.0), url=receiver.url, after=0)
    assert len(receiver.posted) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://127.0.0.1:9/secret-path"}, "the notification was not sent"),
        ({"command": "no-such-program --x"}, "the program was not run"),
        ({"command": "'unclosed"}, "the program was not run"),
        ({"command": f"{sys.executable} -c 'import sys; sys.exit(\"broken\")'"}, "ended with status 1: broken"),
    ],
)
def test_a_failure_is_logged_and_nothing_else(options: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture):
    sent(END, **options)
    assert message in caplog.text
    assert "secret-path" not in caplog.text


def test_a_refusal_of_the_server_is_logged(receiver: Receiver, caplog: pytest.LogCaptureFixture):
    receiver.status = 403
    sent(END, url=receiver.url)
    assert "HTTP Error 403" in caplog.text


def test_an_answer_that_is_not_http_is_logged(receiver: Receiver, caplog: pytest.LogCaptureFixture):
    receiver.status = None
    sent(END, url=receiver.url)
    assert "the notification was not sent: no answer of HTTP" in caplog.text


def test_a_notebook_cannot_name_a_program():
    values = {"notify": {"command": "rm -rf x"}}
    with pytest.raises(ConfigError, match="a notebook may come from someone else"):
        resolve([Layer("notebook", values, "this notebook's settings")])
    assert resolve([Layer("flags", values, "%%accelerate")]).config.notify.command == "rm -rf x"
