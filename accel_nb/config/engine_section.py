"""The options of engines, which start workers."""

from typing import Annotated

from pydantic import AfterValidator, Field

from accel_nb.config.installed import ENGINE_GROUP, installed_entry_points
from accel_nb.config.sections import Section, declare

ENGINES = ("local",)
"""The values of ``engine.kind``, without the engines of other packages."""


def _engine(value: str) -> str:
    if value not in ENGINES and value not in installed_entry_points(ENGINE_GROUP).names:
        raise ValueError("not an engine")
    return value


class EngineOptions(Section):
    """Where workers run."""

    kind: Annotated[str, Field(strict=True), AfterValidator(_engine)] = declare(
        "local",
        "Engine that starts the workers; local is this machine.",
        enum=list(ENGINES),
        flag="engine",
        scope="cell",
    )
