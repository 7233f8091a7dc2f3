"""The options of engines, which start workers."""

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from accel_nb.config.installed import ENGINE_GROUP, installed_entry_points
from accel_nb.config.sections import Section, declare
from accel_nb.config.value_types import Real, Switch, Whole, read_real, read_text, read_whole

ENGINES = ("local", "ray")
"""The values of ``engine.kind``, without the engines of other packages."""


def _engine(value: str) -> str:
    if value not in ENGINES and value not in installed_entry_points(ENGINE_GROUP).names:
        raise ValueError("not an engine")
    return value


class EngineOptions(Section):
    """Where workers run."""

    kind: Annotated[str, Field(strict=True), AfterValidator(_engine)] = declare(
        "local",
        "Engine that starts the workers: local is this machine, ray the nodes of a Ray cluster.",
        enum=list(ENGINES),
        flag="engine",
        scope="cell",
    )
    nodes: Annotated[Annotated[Whole, Field(ge=1, le=256)], BeforeValidator(read_whole)] = declare(
        1,
        "Run on this many nodes of the engine, this machine first; gpus and cpus are the workers of each node.",
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
    lost_after_s: Annotated[Annotated[Real, Field(ge=1, le=3600)], BeforeValidator(read_real)] = declare(
        2.0, "A node that does not answer for so long is lost.", unit="seconds", scope="cell"
    )
    lease_s: Annotated[Annotated[Real, Field(ge=2, le=3600)], BeforeValidator(read_real)] = declare(
        10.0,
        "A node ends its workers when it has received nothing from the notebook for so long.",
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
