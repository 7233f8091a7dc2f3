"""Choice of the layers of a model that are divided.

If a model has a ``tp_plan``, as models of transformers have, the layers that it names are divided. Otherwise groups of
linear layers are found by shape and name, and a group is divided only if a trial has shown that its parts compute the
same as the whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from accel_nb.runtime.tensors.instance_patching import innermost_class
from accel_nb.runtime.tensors.module_paths import submodule_at
from accel_nb.strategies.base import Refusal
from accel_nb.strategies.block_calls import CallHooks, inside
from accel_nb.strategies.module_kinds import kind_of
from accel_nb.strategies.tensor_parallel.divided_layers import LayersToDivide, join
from accel_nb.strategies.tensor_parallel.trial import try_layers
from accel_nb.strategies.trials import TrialFailed

_COLUMNS, _ROWS, _WHOLE = {"colwise"}, {"rowwise"}, {"replicated_with_grad_allreduce"}
# Styles of the plan whose layers are not divided here: each rank computes the whole layer.
_UNDIVIDED_STYLES = {
    "replicate", "replicated", "sequence_parallel", "embedding_rowwise", "colwise_rep", "colwise_gather_output",
    "gather",
}  # fmt: skip
_ROW_NAMES = frozenset(
    {
        "o", "o_proj", "wo", "out", "out_proj", "to_out", "proj", "c_proj", "proj_out", "dense_4h_to_h", "down",
        "down_proj", "fc2", "fc_out", "lin2", "linear2", "w2", "output",
    }
)  # fmt: skip
_HEADS = re.compile(r"(^|_)(n|num|number)?_?.*heads?($|_)|^nheads?$")
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A part of a name that is a number."""
_HOOKED = "hooks read or change its values"
_WIDTHS = re.compile(r"embd|embed|dim|hidden|width|d_model|channels")


@dataclass
class DivisionPlan:
    """The divided layers of a model, and for other modules, by class name, the reason why they are not divided."""

    groups: list[LayersToDivide] = field(default_factory=list)
    not_divided: dict[str, str] = field(default_factory=dict)
    num_layers: int = 0

    @property
    def num_divided(self) -> int:
        """The number of linear layers that are divided."""
        return sum(len(group.columns) + len(group.rows) for group in self.groups)

    def describe(self) -> str:
        """Describe the number of divided layers."""
        return f"{self.num_divided} of {self.num_layers} linear layers"


def plan_division(model: nn.Module, size: int) -> DivisionPlan | Refusal:
    """Return the layers of a model to divide among ``size`` ranks, or the reason why it cannot be divided.

    A model without layers to divide gets an empty plan.
    """
    plan = DivisionPlan(num_layers=sum(isinstance(part, nn.Linear) for part in model.modules()))
    own = getattr(model, "tp_plan", None)
    refused = (
        _add_model_plan(model, own, size, plan) if isinstance(own, Mapping) and own else _search(model, size, plan)
    )
    return plan if refused is None else refused


# --- a model's own plan ---


def _add_model_plan(model: nn.Module, own: Mapping[str, str], size: int, plan: DivisionPlan) -> Refusal | None:
    """Add the layers in a model's ``tp_plan``, which names them with ``*`` in place of numbers."""
    kind = innermost_class(model).__name__
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        style = own.get(_NUMBER.sub("*", name))
        if style is None or style in _UNDIVIDED_STYLES:
            continue
        if style not in _COLUMNS | _ROWS | _WHOLE or (style not in _WHOLE and not _is_linear(module)):
            return Refusal(
                f"the plan of the {kind} divides {name}, a {type(module).__name__}, by {style!r}, "
                "which is not supported",
                "leave mesh.tp at 1 and divide the model by --strategy fsdp",
            )
        styles[name] = style
    owners: dict[str, dict[str, str]] = {}
    for name, style in styles.items():
        owner, _, leaf = name.rpartition(".")
        owners.setdefault(owner, {})[leaf] = style
    tied = _tied(model)
    for owner, leaves in owners.items():
        columns, rows, whole = (
            tuple(leaf for leaf, style in leaves.items() if style in wanted) for wanted in (_COLUMNS, _ROWS, _WHOLE)
        )
        module = submodule_at(model, owner)
        if CallHooks(inside(module)).exist():
            plan.not_divided[innermost_class(module).__name__] = _HOOKED
            continue
        layers = [submodule_at(module, leaf) for leaf in (*columns, *rows)]
        if any(id(value) in tied for layer in layers for value in layer.parameters()):
            continue
        if not (columns and rows):
            return Refusal(
                f"the plan of the {kind} divides {owner} by {'columns' if columns else 'rows'} only",
                "leave mesh.tp at 1 and divide the model by --strategy fsdp",
            )
        refused = _check_numbers(model, owner, columns, rows, size)
        if refused is not None:
            return refused
        plan.groups.append(LayersToDivide(owner, columns, rows, whole, draws=_has_dropout(module)))
    return None


def _has_dropout(owner: nn.Module) -> bool:
    """Return whether a module may draw random numbers in training, by its dropout layers and float attributes."""
    rates = [part.p for part in owner.modules() if isinstance(part, _DROPOUT)]
    rates += [value for name, value in vars(owner).items() if "dropout" in name and isinstance(value, float)]
    return any(rate > 0 for rate in rates)


def _check_numbers(
    model: nn.Module, owner: str, columns: Sequence[str], rows: Sequence[str], size: int
) -> Refusal | None:
    """Return the reason if layers cannot be divided into equal parts of whole heads; None if they can."""
    module = submodule_at(model, owner)
    head = vars(module).get("head_dim")
    for leaf in (*columns, *rows):
        layer: Any = submodule_at(module, leaf)
        number, what = (layer.out_features if leaf in columns else layer.in_features), "features"
        if isinstance(head, int) and head > 0 and number % head == 0:
            number, what = number // head, "heads"
        if number % size:
            return Refusal(
                f"{join(owner, leaf)} of the {innermost_class(model).__name__} has {number} {what}, which "
                f"mesh.tp {size} does not divide",
                f"use {_list_degrees(number)}",
            )
    return None


def _list_degrees(number: int) -> str:
    """Return the values of ``mesh.tp`` that divide a number, as text."""
    found = [str(size) for size in range(1, min(number, 64) + 1) if number % size == 0]
    return f"mesh.tp {', '.join(found)}"


# --- layers found by shape and name ---


def _search(model: nn.Module, size: int, plan: DivisionPlan) -> Refusal | None:
    """Add the groups of linear layers that can be divided; each kind of module is tried once."""
    tied, taken = _tied(model), set[int]()
    results_by_kind: dict[Any, LayersToDivide | str] = {}
    for name, owner in model.named_modules():
        layers: dict[str, Any] = {
            leaf: child
            for leaf, child in owner.named_children()
            if _is_linear(child) and not any(id(value) in tied for value in child.parameters())
        }
        if len(layers) < 2 or isinstance(owner, nn.ModuleList | nn.ModuleDict) or id(owner) in taken:
            continue
        if CallHooks(owner.modules(), includes_library_hooks=True).exist():
            plan.not_divided[innermost_class(owner).__name__] = _HOOKED
            continue
        taken.add(id(owner))
        candidates = list(_candidates(layers))
        if not candidates:
            continue
        kind = innermost_class(owner).__name__
        heads = _head_counts(owner)
        refused = next((_refuse_heads(name, kind, attribute, count, size) for attribute, count in heads.items()
                        if count % size), None)  # fmt: skip
        if refused is not None:
            return refused
        key = kind_of(owner)
        if key not in results_by_kind:
            results_by_kind[key] = _try_candidates(owner, candidates, heads, size)
        result = results_by_kind[key]
        if isinstance(result, str):
            plan.not_divided[kind] = result
        else:
            plan.groups.append(replace(result, owner=name))
    return None


def _refuse_heads(name: str, kind: str, attribute: str, count: int, size: int) -> Refusal:
    return Refusal(
        f"{join(name, attribute)} of a {kind} is {count}, which mesh.tp {size} does not divide",
        f"use {_list_degrees(count)}",
    )


def _candidates(layers: Mapping[str, Any]) -> Iterator[LayersToDivide]:
    """Yield divisions of a module's linear layers, in the order in which they are tried."""
    names = list(layers)
    named = {name for name in names if name in _ROW_NAMES}
    seen: set[tuple[str, ...]] = set()
    for rows, chosen in (
        (named, names),
        ({names[-1]}, names),
        ({names[-1]}, names[-2:]),
        ({names[1]}, names[:2]),
    ):
        columns = tuple(name for name in chosen if name not in rows)
        own_rows = tuple(name for name in chosen if name in rows)
        if not columns or not own_rows or (*columns, "|", *own_rows) in seen:
            continue
        seen.add((*columns, "|", *own_rows))
        widths = {layers[name].in_features for name in columns}
        inner = {layers[name].out_features for name in columns}
        if len(widths) == 1 and all(layers[name].in_features in inner for name in own_rows):
            yield LayersToDivide("", columns, own_rows)


def _try_candidates(
    owner: nn.Module, candidates: Sequence[LayersToDivide], heads: Mapping[str, int], size: int
) -> LayersToDivide | str:
    """Return the first division whose parts compute the same as the whole module, or the reason if there is none."""
    reason = ""
    for group in candidates:
        layers: list[Any] = [submodule_at(owner, name) for name in (*group.columns, *group.rows)]
        numbers = [layer.out_features for layer in layers[: len(group.columns)]]
        numbers += [layer.in_features for layer in layers[len(group.columns) :]]
        if any(number % size for number in numbers):
            reason = (
                reason or f"{size} does not divide its {next(number for number in numbers if number % size)} features"
            )
            continue
        width = layers[0].in_features
        for attributes in _attribute_choices(owner, heads, layers[-1].in_features, size):
            tried = LayersToDivide("", group.columns, group.rows, (), attributes)
            try:
                return replace(tried, draws=try_layers(owner, tried, width, size))
            except TrialFailed as failed:
                reason = reason or str(failed)
    return reason


def _attribute_choices(owner: nn.Module, heads: Mapping[str, int], inner: int, size: int) -> Iterator[tuple[str, ...]]:
    """Yield sets of attributes, such as numbers of heads, that may have to be divided while the module computes."""
    widths = tuple(
        name
        for name, value in vars(owner).items()
        if type(value) is int and value == inner and value % size == 0 and name not in heads and _WIDTHS.search(name)
    )
    yield tuple(heads)
    if widths:
        yield (*heads, *widths)
    if heads:
        yield ()
    for name, value in vars(owner).items():  # a number of heads under another name: the trial decides
        if type(value) is int and value > 1 and value % size == 0 == inner % value and name not in (*heads, *widths):
            yield (*heads, name)


def _head_counts(owner: nn.Module) -> dict[str, int]:
    """Return the numbers of heads among a module's attributes."""
    return {
        name: value
        for name, value in vars(owner).items()
        if type(value) is int and value > 0 and _HEADS.search(name) and not _WIDTHS.search(name) and "size" not in name
    }


def _is_linear(module: nn.Module) -> bool:
    return innermost_class(module) is nn.Linear


def _tied(model: nn.Module) -> set[int]:
    """Return the ids of parameters that have several names."""
    counts = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
    return {key for key, count in counts.items() if count > 1}
