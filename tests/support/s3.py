"""A server of the S3 protocol on loopback, which can be made to fail."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import s3fs
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wsgi import get_input_stream

Fault = Literal["refuse", "busy", "cut", "mute", "hold"] | None
"""The fault of a request: a permanent error (``refuse``), a temporary one (``busy``), a connection that ends before
(``cut``) or after (``mute``) the request is executed, or a wait until `Server.release` (``hold``)."""

_ANSWERS = {"refuse": ("403 Forbidden", "AccessDenied"), "busy": ("503 Slow Down", "SlowDown")}


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *args: Any) -> None:
        pass


@dataclass
class Server:
    """The server; ``rule`` is called for each request that writes, with the key's last part, and returns the fault."""

    url: str = ""
    rule: Callable[[str], Fault] = lambda name: None
    written: list[str] = field(default_factory=list)
    held: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    def wrap(self, app: Any) -> Any:
        """Return an application that fails as the rule says."""

        def answer(environ: dict[str, Any], start: Any) -> Any:
            if environ["REQUEST_METHOD"] not in ("PUT", "POST"):
                return app(environ, start)
            name = environ["PATH_INFO"].rsplit("/", 1)[-1]
            self.written.append(name)
            fault = self.rule(name)
            if fault in _ANSWERS:
                get_input_stream(environ).read()
                status, code = _ANSWERS[fault]
                start(status, [("Content-Type", "application/xml")])
                return [f"<Error><Code>{code}</Code><Message>as the test says</Message></Error>".encode()]
            if fault == "hold":
                self.held.set()
                self.release.wait(60)
            if fault == "mute":
                list(app(environ, lambda *args, **kwargs: None))
            if fault in ("cut", "mute"):
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError
            return app(environ, start)

        return answer


@contextmanager
def running_server(bucket: str) -> Iterator[Server]:
    """Run a server with one empty bucket."""
    server = Server()
    app = DomainDispatcherApplication(create_backend_app)
    web = make_server("127.0.0.1", 0, server.wrap(app), threaded=True, request_handler=_Quiet)
    web.daemon_threads = True
    server.url = f"http://127.0.0.1:{web.server_port}"
    thread = threading.Thread(target=web.serve_forever, name="s3")
    thread.start()
    try:
        with connected(server.url) as fs:
            fs.mkdir(bucket)
        yield server
    finally:
        server.release.set()
        web.shutdown()
        thread.join()
        web.server_close()


@contextmanager
def connected(url: str) -> Iterator[Any]:
    """Point this process to the server, and return a client; the variables are restored afterwards."""
    names = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_RETRY_MODE": "standard",
        "AWS_MAX_ATTEMPTS": "2",
    }
    before = dict(os.environ)
    os.environ.update(names)
    fs = s3fs.S3FileSystem(endpoint_url=url)
    try:
        yield fs
    finally:
        if fs._s3 is not None:
            s3fs.S3FileSystem.close_session(fs.loop, fs._s3)
        s3fs.S3FileSystem.clear_instance_cache()
        os.environ.clear()
        os.environ.update(before)
