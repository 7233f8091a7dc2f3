"""One random session: cells of statements over a small pool of names."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from tests.properties.sessions.statements import ERRORS, GENERAL, HAS_PANDAS, IMPORTS, KINDS, NEEDS_PANDAS, PROCESS

_ALIASES = tuple(f"alias{number}" for number in range(3))
_FIELDS = string.Formatter()


@dataclass(frozen=True)
class SessionCell:
    """The statements of a cell, whether it runs on workers, and a cell magic of the notebook around it."""

    statements: tuple[str, ...]
    is_accelerated: bool = False
    magic: str = ""

    @property
    def source(self) -> str:
        """The source as it runs in a plain kernel."""
        return "\n".join(([self.magic] if self.magic else []) + list(self.statements))

    def on_workers(self, flags: str) -> str:
        """Return the source as it runs with the extension."""
        return f"%%accelerate {flags}\n{self.source}" if self.is_accelerated else self.source


@dataclass(frozen=True)
class Session:
    """The cells of one notebook."""

    number: int
    cells: tuple[SessionCell, ...]


def make_session(number: int) -> Session:
    """Return the session of a number."""
    return Session(number, tuple(_Writer(random.Random(f"session {number}")).cells()))


class _Writer:
    """Writes the cells of one session, with the names that are bound so far."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._names: dict[str, list[str]] = {}
        # Few kinds in a session: statements meet the same objects.
        kinds = chance.sample(sorted(KINDS), k=chance.randint(5, 10))
        kinds = [kind for kind in kinds if HAS_PANDAS or kind not in NEEDS_PANDAS]
        self._kinds = [*dict.fromkeys(["list", "dict", *kinds])]
        if {"optimizer", "scheduler", "trainer", "average"} & set(self._kinds):
            self._kinds = [*dict.fromkeys([*self._kinds, "model", "optimizer", "loader"])]
        self._written: list[SessionCell] = []

    def cells(self) -> list[SessionCell]:
        """Write all cells."""
        chance = self._chance
        self._add([IMPORTS.strip()], is_accelerated=False)
        for _ in range(chance.randint(10, 22)):
            draw = chance.random()
            if draw < 0.12 and len(self._written) > 3:  # an earlier cell, run again
                again = chance.choice([cell for cell in self._written[1:] if "%reset" not in cell.source])
                self._written.append(SessionCell(again.statements, chance.random() < 0.5, again.magic))
            elif draw < 0.135:
                self._add(["%reset -f"], is_accelerated=False)
                self._names.clear()
                self._add([IMPORTS.strip()], is_accelerated=chance.random() < 0.2)
            else:
                statements = [text for _ in range(chance.randint(1, 4)) if (text := self._statement()) is not None]
                is_accelerated = chance.random() < 0.5
                if chance.random() < 0.08:
                    statements += filter(None, [self._fill(chance.choice(ERRORS), {"alias": chance.choice(_ALIASES)})])
                magic = ""
                if not is_accelerated or chance.random() < 0.3:
                    magic = chance.choice(("", "", "", "", "%%time", "%%capture out"))
                if any(text.startswith(("%", "async ")) for text in statements):
                    magic = ""
                if statements:
                    self._add(statements, is_accelerated=is_accelerated, magic=magic)
        return self._written

    def _add(self, statements: Sequence[str], *, is_accelerated: bool, magic: str = "") -> None:
        self._written.append(SessionCell(tuple(statements), is_accelerated, magic))

    def _statement(self) -> str | None:
        chance = self._chance
        for _ in range(20):
            draw = chance.random()
            if draw < 0.1:
                text = chance.choice(PROCESS)
                if HAS_PANDAS or "pd." not in text:
                    return self._fill(text, {})
                continue
            if draw < 0.2:
                text = self._fill(chance.choice(GENERAL), {"alias": chance.choice(_ALIASES)})
                if text is not None:
                    return text
                continue
            kind = chance.choice(self._kinds)
            bound = self._names.get(kind, [])
            if not bound or draw < 0.5:
                name = f"{kind}{chance.randrange(2)}"
                text = self._fill(chance.choice(KINDS[kind].make), {"x": name})
                if text is not None:
                    if name not in bound:
                        self._names.setdefault(kind, []).append(name)
                    return text
            elif KINDS[kind].change:
                text = self._fill(chance.choice(KINDS[kind].change), {"x": chance.choice(bound)})
                if text is not None:
                    return text
        return None

    def _fill(self, template: str, given: dict[str, str]) -> str | None:
        """Return a template with its fields filled, or None if there is no name for one of them."""
        parts: list[str] = []
        once: dict[str, str] = {}
        for literal, field, _, _ in _FIELDS.parse(template):
            parts.append(literal)
            if field is None:
                continue
            text = given.get(field) or once.get(field) or self._field(field)
            if text is None:
                return None
            if field not in ("any", "n"):
                once[field] = text
            parts.append(text)
        return "".join(parts)

    def _field(self, field: str) -> str | None:
        chance = self._chance
        if field == "n":
            return str(chance.randint(1, 5))
        if field == "d":
            return str(chance.randint(1, 2))
        if field == "v":
            return "step"
        if field == "any":
            names = [name for held in self._names.values() for name in held]
            return chance.choice(names) if names else None
        names = self._names.get(field)
        return chance.choice(names) if names else None
