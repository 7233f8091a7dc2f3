"""The options of engines, which start workers."""

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from accel_nb.config.installed import ENGINE_GROUP, installed_entry_points
from accel_nb.config.sections import Section, declare
from accel_nb.config.value_types import (
    Float,
    Int,
    Switch,
    read_float,
    read_int,
    read_names,
    read_text,
)

ENGINES = ("local", "ray", "ssh", "slurm", "kubernetes")
"""The values of ``engine.kind``, without the engines of other packages."""


def _host(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError("not a host")
    return value


_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@%-]{0,254}")
"""No other first character: ssh would take a host that begins with a dash for an option."""

LOCALHOST = "localhost"


def _distinct(value: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
    """Return hosts without duplicates, except this machine, which may be several nodes."""
    if not isinstance(value, tuple):
        return value
    return tuple(host for number, host in enumerate(value) if host == LOCALHOST or host not in value[:number])


HostName = Annotated[str, AfterValidator(_host), Field(strict=True, max_length=255)]


def _engine(value: str) -> str:
    if value not in ENGINES and value not in installed_entry_points(ENGINE_GROUP).names:
        raise ValueError("not an engine")
    return value


class EngineOptions(Section):
    """The machines on which workers run, and how they are reached."""

    kind: Annotated[str, Field(strict=True), AfterValidator(_engine)] = declare(
        "local",
        "Engine that starts the workers: local on this machine, ray on the nodes of a Ray cluster, ssh on machines by "
        "ssh, slurm on the nodes of a Slurm job, kubernetes in pods by kubectl exec.",
        enum=list(ENGINES),
        flag="engine",
        scope="cell",
    )
    nodes: Annotated[Annotated[Int, Field(ge=1, le=256)], BeforeValidator(read_int)] = declare(
        1,
        "Run on this many nodes of the engine; gpus and cpus are the workers of each node.",
        unit="nodes",
        flag="nodes",
        scope="cell",
    )
    address: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=256)] | None, BeforeValidator(read_text)
    ] = declare(
        None,
        "Address of the Ray cluster; if not set, RAY_ADDRESS, or else the cluster that runs on this machine.",
        metavar="HOST:PORT",
        allowed="the address of the head node, such as 10.0.0.1:6379, or none",
        scope="cell",
    )
    hosts: Annotated[tuple[HostName, ...], BeforeValidator(read_names), AfterValidator(_distinct)] = declare(
        (),
        "Machines of the ssh engine, as ssh calls them, or pods of the kubernetes engine; localhost is this machine, "
        "and may be named several times, to try several nodes. The first is node 0. Not allowed in the metadata of a "
        "notebook.",
        metavar="HOSTS",
        allowed="names or addresses of hosts, separated by commas",
        scope="cell",
        refused_layers=["notebook"],
    )
    python: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None, BeforeValidator(read_text)
    ] = declare(
        None,
        "Python that has accel_nb on the machines of the ssh, slurm and kubernetes engines; if not set, the path of "
        "this one. Not allowed in the metadata of a notebook.",
        metavar="PATH",
        allowed="a path, or none",
        scope="cell",
        refused_layers=["notebook"],
    )
    allocation: Annotated[
        Annotated[str, Field(strict=True, min_length=1, max_length=4096)] | None, BeforeValidator(read_text)
    ] = declare(
        None,
        "Options of salloc for the job of the slurm engine, such as --partition=gpu --gres=gpu:4; if not set, "
        "--exclusive. A notebook that runs inside of a job uses that job. Not allowed in the metadata of a notebook.",
        metavar="OPTIONS",
        allowed="options of salloc, or none",
        scope="cell",
        refused_layers=["notebook"],
    )
    lost_after_s: Annotated[Annotated[Float, Field(ge=1, le=3600)], BeforeValidator(read_float)] = declare(
        2.0, "A node that does not answer for this long is lost.", unit="seconds", scope="cell"
    )
    lease_s: Annotated[Annotated[Float, Field(ge=2, le=3600)], BeforeValidator(read_float)] = declare(
        10.0,
        "A node ends its workers when it has received nothing from the notebook for this long.",
        unit="seconds",
        scope="cell",
    )
    insecure: Switch = declare(
        False,
        "Join a cluster without a token, in which any process that reaches its ports can run code. Not allowed in the "
        "metadata of a notebook.",
        flag="insecure",
        scope="cell",
        refused_layers=["notebook"],
    )
