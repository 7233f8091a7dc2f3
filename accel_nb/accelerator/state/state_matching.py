"""Matching of a checkpoint's state with the prepared objects, with one line for each mismatch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accel_nb.checkpoint.encoding import Slice
from accel_nb.runtime.tensors.tied import find_tied
from accel_nb.strategies.base import Bundle


def with_tied(values: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return weights in which each tied tensor is under all of its names; a checkpoint may have one of them only."""
    full = dict(values)
    for group in find_tied(model):
        stored = [name for name in group if name in full]
        full.update({name: full[stored[0]] for name in group if stored and name not in full})
    return full


def match_state(
    tree: Any, live: dict[str, Any], bundle: Bundle, registered: Sequence[Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the state to load, and a line for each mismatch; a part that does not match keeps its live state."""
    problems: list[str] = []
    for what, prepared in (
        ("models", bundle.models),
        ("optimizers", bundle.optimizers),
        ("schedulers", bundle.schedulers),
    ):
        if len(tree[what]) != len(prepared):
            problems.append(f"it holds {len(tree[what])} {what}, and {len(prepared)} are prepared")
    if len(tree["registered"]) != len(registered):
        problems.append(f"it holds {len(tree['registered'])} registered objects, and there are {len(registered)}")
    models = list(live["models"])
    for index, (saved, values) in enumerate(zip(tree["models"], live["models"], strict=False)):
        models[index], found = _fit_model(saved, values, f"model {index}" if len(models) > 1 else "the model")
        problems += found
    optimizers = list(live["optimizers"])
    for index, (saved, values) in enumerate(zip(tree["optimizers"], live["optimizers"], strict=False)):
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        wanted = [len(group["params"]) for group in values["param_groups"]]
        if sizes == wanted:
            optimizers[index] = saved
        else:
            problems.append(f"optimizer {index} was saved with groups of {sizes} parameters, and has {wanted}")
    schedulers = list(live["schedulers"])
    schedulers[: len(tree["schedulers"])] = tree["schedulers"][: len(schedulers)]
    return {
        "models": models,
        "optimizers": optimizers,
        "schedulers": schedulers,
        "precision": tree["precision"],
    }, problems


def _fit_model(saved: Any, live: Any, what: str) -> tuple[Any, list[str]]:
    values, problems = saved["values"], []
    missing = [name for name in live if name not in values]
    unexpected = [name for name in values if name not in live]
    other_shapes = [
        f"{name} ({list(getattr(values[name], 'shape', ()))} instead of {list(live[name].shape)})"
        for name in live
        if name in values
        and isinstance(live[name], Tensor | Slice)
        and tuple(getattr(values[name], "shape", ())) != tuple(live[name].shape)
    ]
    if missing:
        problems.append(f"it lacks tensors of {what}: {', '.join(missing)}")
    if unexpected:
        problems.append(f"it holds tensors that {what} does not have: {', '.join(unexpected)}")
    if other_shapes:
        problems.append(f"other shapes in {what}: {', '.join(other_shapes)}")
    wrong = {text.partition(" (")[0] for text in other_shapes}
    fitting: Any = OrderedDict((name, live[name] if name in wrong else values.get(name, live[name])) for name in live)
    fitting._metadata = OrderedDict(saved["versions"])
    return fitting, problems


def format_mismatches(url: str, problems: Sequence[str]) -> str:
    """Return the error message that lists all mismatches."""
    remedy = "nothing was loaded; strict=False loads what fits"
    return "\n".join(
        [f"{url} does not fit the prepared objects ({remedy}):", *(f"  {problem}" for problem in problems)]
    )
