"""The task of a rank: one JSON document with the target, and the options with their origins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from accel_nb.config import Layer, Resolved
from accel_nb.errors import ConfigError

VERSION = 1
MODULE = "accel_nb.launch.rank"
"""The module that a rank's process runs."""

PROGRAM = "accel_nb.compat.program"
"""The module that runs a script, or ``-m`` and a module, with accel_nb in accelerate's place."""

FINISHING = b"finishing\n"
"""The text that a rank writes to its report when it will end its step, save and stop."""

HANDLING = b"handling\n"
"""The text that it writes when KeyboardInterrupt is raised in the target's code, which may handle it."""

ENDED = b"ended\n"
"""The text that it writes when KeyboardInterrupt has ended the target's code."""

Kind = Literal["script", "module", "notebook"]


@dataclass(frozen=True, slots=True)
class Target:
    """The program to run: the path of a script or notebook, or a module's name, with its unparsed arguments."""

    kind: Kind
    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankTask:
    """A target with the layers of its options.

    ``report_file`` is an inherited descriptor for the report of a failure, ``location_file`` one for the rank's
    location, and ``parent`` the process that reads them: a rank ends with it. The run is recorded in ``folder``, and
    ``out`` is the path of a notebook's executed copy.
    """

    kind: Kind
    name: str
    layers: tuple[Layer, ...] = ()
    report_file: int | None = None
    location_file: int | None = None
    parent: int | None = None
    folder: str | None = None
    out: str | None = None

    def command(self, python: str, args: Sequence[str]) -> list[str]:
        """Return the words that start a rank."""
        return [python, "-m", MODULE, self.to_json(), *args]

    def to_json(self) -> str:
        """Return the document."""
        fields = asdict(self)
        fields["layers"] = [[layer.name, layer.source, dict(layer.values), dict(layer.places)] for layer in self.layers]
        return json.dumps({"version": VERSION, **fields}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> RankTask:
        """Rebuild what `to_json` wrote; raise ConfigError for anything else."""
        try:
            fields = json.loads(text)
            if fields.pop("version") != VERSION:
                raise ValueError("another version")
            layers = tuple(Layer(name, values, source, places) for name, source, values, places in fields.pop("layers"))
            return cls(**fields, layers=layers)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"a rank was given a damaged task: {error}; start it with accel-nb launch") from None


def layers_to_send(resolved: Resolved, *, notifies: bool) -> tuple[Layer, ...]:
    """Return the layers for the ranks; a file of options has been read, so its path is left out.

    ``notifies``: the ranks notify of the ends of runs themselves. Else they do not get the URL for that, which may be
    secret: any user of the machine can read the words that a process was started with.
    """
    sent: list[Layer] = []
    for layer in resolved.layers:
        values: dict[str, Any] = {
            name: value
            for name, value in layer.values.items()
            if name != "config" and (notifies or not name.startswith("notify."))
        }
        if values:
            places = {name: layer.places[name] for name in values if name in layer.places}
            sent.append(Layer(layer.name, values, layer.source, places))
    return tuple(sent)
