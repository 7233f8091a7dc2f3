"""The state of a node's machine as a message."""

from __future__ import annotations

from dataclasses import asdict

from accel_nb.pool.channel import Message
from accel_nb.runtime.process.hardware import Gpu, Machine


def pack_machine(machine: Machine) -> Message:
    """Return a machine as a message."""
    return asdict(machine)


def read_machine(message: Message) -> Machine:
    """Return the machine of a message."""
    gpus = tuple(Gpu(**{**gpu, "capability": tuple(gpu["capability"])}) for gpu in message["gpus"])
    return Machine(**{**message, "gpus": gpus, "gpu_problems": tuple(message["gpu_problems"])})
