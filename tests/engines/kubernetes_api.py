"""A server of the few calls of the Kubernetes API that `kubectl get pod` and `kubectl exec` make.

Pods are names: what is executed in one runs on this machine. Protocol of streams: ``v5.channel.k8s.io``, in which the
first byte of a message is its channel.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler
from tornado.websocket import WebSocketHandler

STDIN, STDOUT, STDERR, STATUS, CLOSE = 0, 1, 2, 3, 255


class Discovery(RequestHandler):
    """Answers which kinds of objects there are: pods."""

    def get(self, path: str) -> None:
        if path == "api":
            self.write({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            self.write({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})
        else:
            pods = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["get"]}
            self.write({"kind": "APIResourceList", "groupVersion": "v1", "resources": [pods]})


class Pod(RequestHandler):
    """Answers with a pod's state."""

    def initialize(self, phases: Mapping[str, str]) -> None:
        self.phases = phases

    def get(self, name: str) -> None:
        if name not in self.phases:
            self.set_status(404)
            message = f'pods "{name}" not found'
            failed = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            self.write({**failed, "metadata": {}, "message": message})
            return
        phase = self.phases[name]
        status = {"phase": phase, "podIP": "127.0.0.1" if phase == "Running" else ""}
        metadata = {"name": name, "namespace": "default"}
        spec = {"containers": [{"name": "main"}]}
        self.write({"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec, "status": status})


class Exec(WebSocketHandler):
    """Runs a command, whose standard streams are channels of the connection."""

    process: asyncio.subprocess.Process

    def select_subprotocol(self, subprotocols: list[str]) -> str | None:
        return "v5.channel.k8s.io" if "v5.channel.k8s.io" in subprotocols else None

    async def open(self, name: str) -> None:
        command = self.get_query_arguments("command")
        pipe = asyncio.subprocess.PIPE
        try:
            self.process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
        except FileNotFoundError as error:
            await self._end({"status": "Failure", "reason": "InternalError", "message": f"exec failed: {error}"})
            return
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await asyncio.gather(self._copy(self.process.stdout, STDOUT), self._copy(self.process.stderr, STDERR))
        code = await self.process.wait()
        causes = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
        failed = {"status": "Failure", "reason": "NonZeroExitCode", "message": f"exit code {code}", "details": causes}
        await self._end(failed if code else {"status": "Success"})

    async def _copy(self, stream: Any, channel: int) -> None:
        while data := await stream.read(65536):
            await self.write_message(bytes([channel]) + data, binary=True)

    async def _end(self, status: Mapping[str, Any]) -> None:
        await self.write_message(bytes([STATUS]) + json.dumps(status).encode(), binary=True)
        self.close(1000)

    async def on_message(self, message: str | bytes) -> None:
        assert isinstance(message, bytes)
        if not hasattr(self, "process") or self.process.stdin is None:
            return
        if message[0] == STDIN:
            self.process.stdin.write(message[1:])
            await self.process.stdin.drain()
        elif message[:2] == bytes([CLOSE, STDIN]):
            self.process.stdin.close()

    def on_close(self) -> None:
        if hasattr(self, "process") and self.process.stdin is not None:
            self.process.stdin.close()


async def serve(phases: Mapping[str, str]) -> None:
    """Serve on a free port of the loopback address, which is printed, until standard input is closed."""
    pod = r"/api/v1/namespaces/default/pods/([^/]+)"
    application = Application(
        [(r"/(api|apis|api/v1)", Discovery), (pod, Pod, {"phases": phases}), (f"{pod}/exec", Exec)],
        websocket_max_message_size=2**30,
    )
    (socket,) = bind_sockets(0, "127.0.0.1")
    HTTPServer(application).add_sockets([socket])
    print(socket.getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
