"""What a browser may ask of a panel: a closed set of records, checked where they come in, each with its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from accel_nb.ui.run_comparison import EarlierRun
from accel_nb.ui.view import Block, PanelState


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer may be made of: the run that is drawn, if it is still kept, and the others of the notebook."""

    state: PanelState | None
    others: Sequence[EarlierRun] = ()


@dataclass(frozen=True, slots=True)
class Detail:
    """The part of a curve that is looked at: steps from ``first`` to ``last``."""

    table: Literal["step", "metric"]
    name: str
    first: float
    last: float

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Detail | None:
        """Return what a message from a browser asks for; None for one that is not ours."""
        table, name = content.get("table"), content.get("name")
        first, last = _place(content.get("first")), _place(content.get("last"))
        if table not in ("step", "metric") or not isinstance(name, str) or first is None or last is None:
            return None
        return cls(table, name, first, last)

    @property
    def key(self) -> object:
        """Questions of one key are answered once, by the last of them: one looks at one part at a time."""
        return Detail

    def answer(self, asked: Asked) -> tuple[dict[str, Any], list[Block]]:
        """Return the rows as they are."""
        state = asked.state
        blocks = [] if state is None else state.detail(self.table, self.name, self.first, self.last)
        where = {"table": self.table, "name": self.name, "first": self.first, "last": self.last}
        return {"kind": "detail", **where}, blocks


@dataclass(frozen=True, slots=True)
class EarlierList:
    """Which runs there are to compare with."""

    @property
    def key(self) -> object:
        """Each is like the other."""
        return self

    def answer(self, asked: Asked) -> tuple[dict[str, Any], list[Block]]:
        """Return their numbers, titles and summaries."""
        runs = [{"run": run.number, "title": run.title, "summary": run.summary} for run in asked.others]
        return {"kind": "earlier", "runs": runs}, []


@dataclass(frozen=True, slots=True)
class EarlierCurve:
    """One curve of an earlier run."""

    run: int
    table: Literal["step", "metric"]
    name: str

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> EarlierCurve | None:
        """Return what a message from a browser asks for; None for one that is not ours."""
        run, table, name = content.get("run"), content.get("table"), content.get("name")
        if type(run) is not int or table not in ("step", "metric") or not isinstance(name, str):
            return None
        return cls(run, table, name)

    @property
    def key(self) -> object:
        """Each curve is a question of its own."""
        return self

    def answer(self, asked: Asked) -> tuple[dict[str, Any], list[Block]]:
        """Return its rows: none of a run that is kept no more, or that has no such curve."""
        run = next((run for run in asked.others if run.number == self.run), None)
        blocks = [] if run is None else run.blocks(self.table, self.name)
        num_workers = 1 if run is None else run.num_workers
        return {"kind": "earlier curve", "run": self.run, "num_workers": num_workers}, blocks


Question = Detail | EarlierList | EarlierCurve


def read_question(content: object) -> Question | None:
    """Return what a message from a browser asks; None for anything that is no question."""
    if not isinstance(content, Mapping):
        return None
    message: Mapping[str, Any] = content  # pyright: ignore[reportUnknownVariableType]
    match message.get("kind"):
        case "detail":
            return Detail.parse(message)
        case "earlier":
            return EarlierCurve.parse(message) if "run" in message else EarlierList()
        case _:
            return None


def _place(value: object) -> float | None:
    """Return a number that can be a place on an axis; None for everything else that JSON has."""
    return float(value) if isinstance(value, int | float) and type(value) is not bool and abs(value) < 1e300 else None
