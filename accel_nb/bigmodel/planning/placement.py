"""Description of a device map: look-up of places, and the memory use of each device as a table or bars."""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from accel_nb.bigmodel.planning.sizes import Device, get_max_memory, list_ancestors, list_tensors
from accel_nb.config.byte_sizes import size_text

DeviceMap = dict[str, Device]
"""Names of modules or tensors (``""`` is the whole model) and their places."""

_BAR_WIDTH = 10
_COLORS = {"cpu": "#009e73", "disk": "#9a9a9a"}
_DEVICE_COLOR, _OVER_COLOR = "#0072b2", "#d55e00"
_BOX = "font-family: var(--jp-ui-font-family, sans-serif); font-size: 12px; padding: 4px 0; max-width: 720px"
_ROW = "display: flex; align-items: center; gap: 8px; margin: 3px 0"
_TRACK = "flex: 1; height: 12px; background: rgba(127, 127, 127, 0.18); border-radius: 2px; overflow: hidden"
_FAINT = "opacity: 0.75"


@dataclass(frozen=True)
class Occupancy:
    """The planned memory of one place."""

    place: str
    nbytes: int
    limit: int | None
    """In bytes; None if unknown, as for a disk."""
    parts: tuple[str, ...]

    @property
    def share(self) -> float | None:
        """The used share of the limit."""
        return self.nbytes / self.limit if self.limit else None

    @property
    def amount(self) -> str:
        """The sizes as text."""
        if self.limit is None or self.share is None:
            return size_text(self.nbytes)
        return f"{size_text(self.nbytes)} of {size_text(self.limit)} ({self.share:.0%})"


@dataclass(frozen=True)
class Placement:
    """The planned memory of each place: prints as a table, displays as bars in a notebook."""

    places: tuple[Occupancy, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        rows = [["device", "limit", "weights", "filled", "parts"]]
        for own in self.places:
            limit = "" if own.limit is None else size_text(own.limit)
            filled = "" if own.share is None else _text_bar(own.share)
            rows.append([own.place, limit, size_text(own.nbytes), filled, _shortened(own.parts)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return bars without scripts or links; a bar without a limit is relative to the largest place."""
        largest = max((own.nbytes for own in self.places), default=0)
        bars = [_html_bar(own, own.nbytes / largest if largest else 0.0) for own in self.places]
        notes = [f'<div style="{_FAINT}">{html.escape(note)}</div>' for note in self.notes]
        return f'<div style="{_BOX}">{"".join([*bars, *notes])}</div>'

    def show(self) -> None:
        """Display bars in a notebook, else print the table."""
        shell = sys.modules.get("IPython")
        if shell is None or shell.get_ipython() is None:
            print(self)
            return
        from IPython.display import display

        display(self)


def find_place(name: str, device_map: Mapping[str, Device]) -> Device | None:
    """Return the place of a tensor or module: the map's entry for it or its nearest ancestor, else None."""
    return next((device_map[prefix] for prefix in reversed(list_ancestors(name)) if prefix in device_map), None)


def describe_device_map(
    model: nn.Module,
    device_map: Mapping[str, Device],
    *,
    max_memory: Mapping[Device, int | str] | None = None,
    dtype: torch.dtype | str | None = None,
    special_dtypes: Mapping[str, torch.dtype | str] | None = None,
    notes: Sequence[str] = (),
) -> Placement:
    """Return the limit, used bytes and parts of each device; ``notes`` are lines below."""
    used: dict[str, int] = {}
    parts: dict[str, list[str]] = {}
    for name, device in device_map.items():
        parts.setdefault(str(device), []).append(name or "the whole model")
    for tensor in list_tensors(model, dtype, special_dtypes):
        place = str(find_place(tensor.name, device_map))
        used[place] = used.get(place, 0) + tensor.nbytes
    limits = {str(device): limit for device, limit in get_max_memory(max_memory).items()}
    return Placement(
        tuple(
            Occupancy(place, used.get(place, 0), limits.get(place), tuple(parts.get(place, ())))
            for place in dict.fromkeys([*limits, *parts])
        ),
        tuple(notes),
    )


def _text_bar(share: float) -> str:
    full = min(_BAR_WIDTH, round(share * _BAR_WIDTH))
    return f"{'#' * full}{'.' * (_BAR_WIDTH - full)} {share:4.0%}"


def _html_bar(own: Occupancy, of_largest: float) -> str:
    share = of_largest if own.share is None else own.share
    color = _OVER_COLOR if own.share is not None and share > 1 else _COLORS.get(own.place, _DEVICE_COLOR)
    filled = f'<div style="width: {min(1.0, share):.1%}; height: 100%; background: {color}"></div>'
    return (
        f'<div style="{_ROW}"><b style="width: 64px">{html.escape(own.place)}</b><div style="{_TRACK}">{filled}</div>'
        f'<span style="width: 190px">{html.escape(own.amount)}</span></div>'
        f'<div style="{_FAINT}; margin-left: 72px">{html.escape(_shortened(own.parts))}</div>'
    )


def _shortened(parts: Sequence[str], most: int = 3) -> str:
    if len(parts) <= most + 1:
        return ", ".join(parts)
    return f"{', '.join(parts[: most - 1])}, ... {parts[-1]} ({len(parts)} in all)"
