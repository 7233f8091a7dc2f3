"""Labels that a user adds to a run: a name, notes, tags and a star; stored in a file beside the run's record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from accel_nb.errors import ConfigError

LABELS = "labels.json"
MAX_NAME, MAX_NOTES, MAX_TAG, MAX_TAGS = 200, 10_000, 50, 20


@dataclass(frozen=True, slots=True)
class RunLabels:
    """The labels of a run; with an empty ``name`` the run keeps the name that it was recorded with."""

    name: str = ""
    notes: str = ""
    tags: tuple[str, ...] = ()
    is_starred: bool = False

    def changed(self, values: Mapping[str, Any]) -> RunLabels:
        """Return the labels with the given fields replaced. Raise ConfigError for unknown fields and wrong values."""
        allowed = [field.name for field in fields(self)]
        for name in values:
            if name not in allowed:
                raise ConfigError(f"a run has no label {name!a}; allowed: {', '.join(allowed)}")
        name, notes = values.get("name", self.name), values.get("notes", self.notes)
        tags, is_starred = values.get("tags", self.tags), values.get("is_starred", self.is_starred)
        if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
            raise ConfigError(f"the name of a run is one line of at most {MAX_NAME} characters, not {_shorten(name)}")
        if not isinstance(notes, str) or len(notes) > MAX_NOTES:
            raise ConfigError(f"the notes of a run are a text of at most {MAX_NOTES:,} characters")
        if not isinstance(tags, list | tuple) or len(tags) > MAX_TAGS:
            raise ConfigError(f"a run has at most {MAX_TAGS} tags")
        for tag in tags:
            if not isinstance(tag, str) or not 0 < len(tag) <= MAX_TAG or not tag.isprintable() or "," in tag:
                raise ConfigError(f"a tag is a text of 1 to {MAX_TAG} characters without commas, not {_shorten(tag)}")
        if not isinstance(is_starred, bool):
            raise ConfigError(f"is_starred is true or false, not {_shorten(is_starred)}")
        unique = tuple(dict.fromkeys(tag.strip() for tag in tags if tag.strip()))
        return replace(self, name=name.strip(), notes=notes, tags=unique, is_starred=is_starred)

    def to_json(self) -> str:
        """Return the document that `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> RunLabels:
        """Return the labels in a document. Raise ValueError for other documents."""
        try:
            found = json.loads(text)
        except RecursionError:
            raise ValueError("not labels: nested too deeply") from None
        if not isinstance(found, dict):
            raise ValueError("not labels: no JSON object")
        return cls().changed(found)


def _shorten(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
