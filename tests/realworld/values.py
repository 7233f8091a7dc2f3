"""Values of a notebook as flat, plain entries: written in the kernel, compared in the test's process."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TOLERANCE = 1e-6
Entry = float | str | list[float]
"""One leaf: a number, a text (of what else there is, its repr), or a tensor's shape and elements behind one another."""
Entries = dict[str, Entry]
MISSING = "(no such name)"


def collect_values(names: Sequence[str], namespace: dict[str, Any]) -> Entries:
    """Evaluate expressions in a namespace and return their entries."""
    found: Entries = {}
    for name in names:
        try:
            value = eval(name, namespace)
        except NameError:
            found[name] = MISSING
        else:
            _flatten(name, value, found)
    return found


def write_values(names: Sequence[str], namespace: dict[str, Any], path: str) -> None:
    """Evaluate expressions in a namespace and write their entries into a file."""
    Path(path).write_text(json.dumps(collect_values(names, namespace)))


def read_values(path: Path) -> Entries:
    """Return the entries of a file that `write_values` has written."""
    return json.loads(path.read_text())


def differences(plain: Entries, other: Entries, tolerance: float = TOLERANCE) -> list[str]:
    """Return what of two runs' entries differs by more than the tolerance, a line each."""
    lines = [f"{path}: only in one of the runs" for path in sorted(plain.keys() ^ other.keys())]
    for path in plain.keys() & other.keys():
        one, two = plain[path], other[path]
        if isinstance(one, str) or isinstance(two, str):
            if one != two:
                lines.append(f"{path}: {one!r:.200} plainly, {two!r:.200} on workers")
            continue
        ones, twos = one if isinstance(one, list) else [one], two if isinstance(two, list) else [two]
        if len(ones) != len(twos):
            lines.append(f"{path}: {len(ones)} numbers plainly, {len(twos)} on workers")
        elif (largest := max(map(_distance, ones, twos), default=0.0)) > tolerance:
            lines.append(f"{path}: differs by up to {largest:.3g}")
    return lines


def _distance(one: float, two: float) -> float:
    """Return the difference of two numbers, relative where they are large; 0 for two that are both no number."""
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    distance = abs(one - two) / max(1.0, abs(one))
    return math.inf if math.isnan(distance) else distance


def _flatten(path: str, value: Any, found: Entries) -> None:
    import numpy
    import torch

    if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
        _flatten(path, value.state_dict(), found)
    elif isinstance(value, torch.Tensor):
        _flatten(path, value.detach().to_dense().numpy(), found)
    elif isinstance(value, (complex, numpy.ndarray)) and numpy.iscomplexobj(value):
        _flatten(path, numpy.stack([numpy.real(value), numpy.imag(value)]), found)
    elif isinstance(value, numpy.ndarray):
        found[f"{path} (shape)"] = [float(size) for size in value.shape]
        found[path] = [float(element) for element in value.ravel().tolist()]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _flatten(path, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, found)
    elif isinstance(value, Mapping):
        found[f"{path} (keys)"] = repr(list(value))
        for key, item in value.items():
            _flatten(f"{path}[{key!r}]", item, found)
    elif isinstance(value, (list, tuple)):
        found[f"{path} (length)"] = float(len(value))
        for index, item in enumerate(value):
            _flatten(f"{path}[{index}]", item, found)
    elif isinstance(value, (set, frozenset)):
        _flatten(path, sorted(value, key=repr), found)
    elif isinstance(value, (int, float, numpy.number)):
        found[path] = float(value)
    else:
        found[path] = value if isinstance(value, str) else repr(value)
