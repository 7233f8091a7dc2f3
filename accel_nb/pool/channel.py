"""Control messages between processes: JSON and file descriptors over an anonymous socket pair.

A message is one packet of a ``SOCK_SEQPACKET`` pair, so it arrives whole or not at all. A message too long for a
packet is written into an anonymous memory file, whose descriptor is sent in the packet. No data is unpickled here.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from array import array
from collections.abc import Sequence
from typing import Any

MAX_PACKET = 64 * 1024
MAX_MESSAGE = 256 * 1024 * 1024
MAX_DESCRIPTORS = 16

Message = dict[str, Any]


class ChannelError(ValueError):
    """Data on a channel that is not a valid message."""


class Channel:
    """One end of a message pair; not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # the notebook may have called `socket.setdefaulttimeout`
        self._socket = sock

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Create a pair: this process's end as a channel, the other as a socket to pass to another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.settimeout(None)
        return cls(ours), theirs

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """Return a channel that owns an inherited descriptor."""
        return cls(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: Message, descriptors: Sequence[int] = (), *, waits: bool = True) -> None:
        """Send one message; while the queue is full, block, or without ``waits`` raise BlockingIOError.

        Raise ConnectionError if the other end is closed, ChannelError if the message is over the limit.
        """
        body = json.dumps(message, separators=(",", ":"), allow_nan=True).encode()
        if len(body) > MAX_MESSAGE:
            raise ChannelError(f"a message of {len(body)} bytes is over the limit of {MAX_MESSAGE}")
        if len(body) <= MAX_PACKET:
            self._send_packet(b"i" + body, descriptors, waits=waits)
            return
        overflow_file = os.memfd_create("accel_nb_message", os.MFD_CLOEXEC)
        try:
            with os.fdopen(overflow_file, "wb", closefd=False) as file:
                file.write(body)
            self._send_packet(b"s", [overflow_file, *descriptors], waits=waits)
        finally:
            os.close(overflow_file)

    def _send_packet(self, packet: bytes, descriptors: Sequence[int], *, waits: bool) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        self._socket.sendmsg([packet], rights, 0 if waits else socket.MSG_DONTWAIT)

    def receive(self) -> tuple[Message, list[int]]:
        """Wait for one message and its descriptors, which the caller closes; raise EOFError after the last."""
        try:
            packet, descriptors, flags, _ = socket.recv_fds(self._socket, MAX_PACKET + 1, MAX_DESCRIPTORS)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
        except ConnectionResetError:
            raise EOFError from None
        if not packet:
            raise EOFError
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ChannelError("a packet was cut short")
            return self._parse(packet, descriptors), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def close(self) -> None:
        """Close this end; a second call does nothing."""
        self._socket.close()

    @staticmethod
    def _parse(packet: bytes, descriptors: list[int]) -> Message:
        if packet[:1] == b"s" and descriptors:
            overflow_file = descriptors.pop(0)
            try:
                body = _read_overflow_file(overflow_file)
            finally:
                os.close(overflow_file)
        elif packet[:1] == b"i":
            body = packet[1:]
        else:
            raise ChannelError(f"a packet of an unknown kind {packet[:1]!r}")
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ChannelError(f"a message is not JSON: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ChannelError("a message is not an object with a kind")
        return message


def _read_overflow_file(descriptor: int) -> bytes:
    """Return the content of a memory file at its current length: other processes may still change it."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):  # reading from a pipe could block forever
        raise ChannelError("a message is in no file")
    if status.st_size > MAX_MESSAGE:
        raise ChannelError(f"a message is over the limit of {MAX_MESSAGE} bytes")
    try:
        return os.pread(descriptor, status.st_size, 0)
    except OSError as error:
        raise ChannelError(f"a message cannot be read: {error.strerror}") from None
