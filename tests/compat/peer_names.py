"""Compare the alias with the installed accelerate by introspection, and write ``docs/accelerate_names.md``.

Run as a program after a change of names: ``python -m tests.compat.peer_names``.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accel_nb.compat.names.supported import SUPPORTED
from accel_nb.compat.names.table import MODULES, reason_for

PAGE = Path(__file__).parents[2] / "docs" / "accelerate_names.md"

_INTROSPECTION = """
import enum, importlib, inspect, json, pkgutil, accelerate, accelerate.utils

def parameters(value):
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return sorted(str(member.value) for member in value)
    try:
        found = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    open_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, item in found.items() if item.kind not in open_kinds]

names = {}
for prefix in ("accelerate", "accelerate.utils"):
    for found in pkgutil.iter_modules(importlib.import_module(prefix).__path__, f"{prefix}."):
        if found.name in ("accelerate.commands", "accelerate.test_utils", "accelerate.utils.rich"):
            continue  # its command line, its own tests, and what needs a package that is not there
        module = importlib.import_module(found.name)
        own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", "") == found.name}
        names[found.name] = {name: parameters(value) for name, value in own.items() if not name.startswith("_")}
for name, module in (("accelerate", accelerate), ("accelerate.utils", accelerate.utils)):
    of_package = lambda value: str(getattr(value, "__module__", "")).startswith("accelerate")
    found = {key: value for key, value in vars(module).items() if not key.startswith("_") and of_package(value)}
    names[name] = {key: parameters(value) for key, value in found.items()}
members = {}
for module in names:
    for name, kind in vars(importlib.import_module(module)).items():
        if inspect.isclass(kind) and kind.__module__.startswith("accelerate") and not issubclass(kind, Exception):
            own = {key: value for base in reversed(kind.__mro__) if base.__module__.startswith("accelerate")
                   for key, value in vars(base).items()}
            fields = getattr(kind, "__dataclass_fields__", {})
            public = {key for key in {*own, *fields} if not key.startswith("_")}
            members[name] = {key: parameters(getattr(kind, key, None)) for key in sorted(public)}
print(json.dumps({"names": names, "members": members}))
"""


def peer() -> dict[str, Any]:
    """Return the public names of accelerate by module with their parameters, and the members of `Accelerator`."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _INTROSPECTION], check=True, timeout=300, capture_output=True, text=True
    )
    return json.loads(found.stdout.splitlines()[-1])


def _object(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _lacking(place: str, parameters: list[str]) -> list[str]:
    """Return the parameters that an object of ours does not take."""
    found = _object(place)
    if inspect.isclass(found) and issubclass(found, Enum):
        return sorted(set(parameters) - {str(member.value) for member in found})
    try:
        own = inspect.signature(found).parameters
    except (TypeError, ValueError):
        return []
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in own.values()):
        return []
    return [name for name in parameters if name not in own and name not in ("self", "args", "kwargs")]


_NOT_THERE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "AcceleratedScheduler": ("print_lr", "PyTorch has removed it from schedulers"),
        "DataLoaderAdapter": ("*", "a class for `isinstance`: loaders keep their class"),
        "DataLoaderDispatcher": ("*", "loaders with a state are torchdata's; checkpoints have the position of others"),
        "DataLoaderShard": ("*", "loaders with a state are torchdata's; checkpoints have the position of others"),
        "SkipDataLoader": ("*", "loaders with a state are torchdata's; checkpoints have the position of others"),
        "FullyShardedDataParallelPlugin": (
            "activation_checkpointing_offload", "activations are recomputed, and not moved to host memory"
        ),
        "MegatronLMPlugin": ("*", "fields of Megatron-LM's own models and loops are refused when it is used"),
        "ParallelismConfig": ("to_json", "it returns None there"),
        "TorchTensorParallelPlugin": ("torch_device_mesh", "the mesh is made from the sizes"),
    }
)  # fmt: skip
"""Members of accelerate's classes that ours do not have, all (``*``) or by name, with the reason."""


def lacking_members(members: Mapping[str, Mapping[str, list[str]]]) -> dict[str, list[str]]:
    """Return the public members of accelerate's classes that a supported class of ours lacks, without those listed."""
    places = {name: place for supported in SUPPORTED.values() for name, place in supported.items()}
    found: dict[str, list[str]] = {}
    for name, theirs in members.items():
        ours = _object(places[name]) if name in places else None
        if not inspect.isclass(ours):
            continue
        left, _ = _NOT_THERE.get(name, ("", ""))
        has = {*dir(ours), *dir(type(ours)), *getattr(ours, "__dataclass_fields__", ()), *_set_by(ours)}
        if (kind := getattr(ours, "kind", None)) is not None:
            has |= {*dir(kind), *_set_by(kind)}  # a prepared object has those of its own class
        has |= set(vars(ours).get("__annotations__", ()))
        lacking = [key for key in theirs if key not in has and left not in ("*", key)]
        lacking += [
            f"{key}({', '.join(without)})"
            for key, parameters in theirs.items()
            if key in has and left != "*" and (without := _without(getattr(ours, key, None), parameters))
        ]
        if lacking:
            found[name] = lacking
    return found


def _without(method: Any, parameters: list[str]) -> list[str]:
    """Return the parameters that a method of ours does not take."""
    try:
        own = inspect.signature(method).parameters
    except (TypeError, ValueError):
        return []
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in own.values()):
        return []
    return [name for name in parameters if name not in own and name not in ("self", "cls")]


def _set_by(kind: Any) -> set[str]:
    """Return the attributes that the methods of a class set on an object."""
    text = "".join(
        inspect.getsource(base) for base in kind.__mro__ if base.__module__.startswith(("accel_nb", "torch.optim"))
    )
    return set(re.findall(r"self\.(\w+)(?=[^\n]* = )", text))


def page(found: dict[str, Any]) -> str:
    """Return the page."""
    lines = [
        "# Names of accelerate under the alias",
        "",
        "Generated by `python -m tests.compat.peer_names` from the installed accelerate 1.15.0. After",
        "`accel_nb.compat.install()` each name is **supported**, or can be imported and raises an error **at use**,",
        "with what to use instead. [From accelerate](migration.md) lists where a supported name behaves otherwise.",
        "",
        "| module | names | supported | refused at use | missing |",
        "| --- | --- | --- | --- | --- |",
    ]
    refused: dict[str, set[str]] = {}
    changed: dict[str, list[str]] = {}
    totals = [0, 0, 0, 0]
    for module, names in sorted(found["names"].items()):
        own = MODULES.get(module, {})
        supported = [name for name in names if name in SUPPORTED.get(module, {})]
        missing = [name for name in names if name not in own]
        at_use = [name for name in names if name in own and name not in supported]
        row = [len(names), len(supported), len(at_use), len(missing)]
        totals = [total + count for total, count in zip(totals, row, strict=True)]
        lines.append(f"| `{module}` | {' | '.join(map(str, row))} |")
        for name in at_use:
            refused.setdefault(reason_for(name), set()).add(name)
        for name in supported:
            if lacking := _lacking(own[name], names[name]):
                changed[name] = lacking
    lines.append(f"| all | {' | '.join(map(str, totals))} |")
    lines += ["", "## Refused at use", "", "| reason, and what to use instead | names |", "| --- | --- |"]
    lines += [f"| {reason} | {', '.join(f'`{name}`' for name in sorted(names))} |" for reason, names in refused.items()]
    lines += ["", "## Parameters and values that are not accepted", ""]
    lines += ["| name | parameters |", "| --- | --- |"]
    lines += [f"| `{name}` | {', '.join(f'`{item}`' for item in items)} |" for name, items in sorted(changed.items())]
    counted = sum(map(len, found["members"].values()))
    without = lacking_members(found["members"])
    missing = "; ".join(f"`{name}`: {', '.join(items)}" for name, items in sorted(without.items()))
    lines += ["", "## Members of classes", "", "| class | members that are not there | reason |", "| --- | --- | --- |"]
    lines += [
        f"| `{name}` | {'several' if left == '*' else left} | {why} |" for name, (left, why) in _NOT_THERE.items()
    ]
    lines += [
        "",
        f"{len(found['members'])} classes with {counted} public members; others missing: {missing or 'none'}.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(peer()))
