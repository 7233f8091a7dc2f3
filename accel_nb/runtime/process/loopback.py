"""The loopback interface, over which processes of one machine connect to each other."""

from __future__ import annotations

import socket

import psutil

from accel_nb.errors import PoolError


def find_loopback() -> str:
    """Return the name of the network interface that has the address 127.0.0.1, usually ``lo``.

    Raises `PoolError` if there is none, or if it is down: process groups could not be opened.
    """
    states = psutil.net_if_stats()
    names = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.family == socket.AF_INET and one.address.startswith("127.") for one in addresses)
    ]
    for name in names:
        if name not in states or states[name].isup:
            return name
    what = f"the network interface {names[0]} is down" if names else "no network interface has the address 127.0.0.1"
    raise PoolError(
        f"{what}, and workers of one machine reach each other by it: `ip link set {names[0] if names else 'lo'} up` "
        "switches it on, as root"
    )
