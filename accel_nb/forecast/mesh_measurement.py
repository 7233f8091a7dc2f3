"""Measurement of the part of a model on one rank of a mesh, and of the bytes that the rank sends. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accel_nb.errors import MisuseError
from accel_nb.forecast.measurement import Loss, measure_activations
from accel_nb.forecast.memory import Activations
from accel_nb.forecast.meshes import MeshShape, MeshSizes
from accel_nb.forecast.plans import RunSetting
from accel_nb.forecast.sizes import ModelSizes
from accel_nb.runtime.tensors.nested import find_tensors, map_tensors
from accel_nb.strategies.base import Refusal
from accel_nb.strategies.block_calls import chain_input
from accel_nb.strategies.context_parallel.divided_sequences import find_blocks, refuse_blocks
from accel_nb.strategies.expert_parallel.expert_plan import plan_experts
from accel_nb.strategies.pipeline.stage_plan import StagePlan, plan_stages, staged_parameters
from accel_nb.strategies.tensor_parallel.divided_layers import divided_parameters
from accel_nb.strategies.tensor_parallel.plan import DivisionPlan, plan_division


def measure_mesh(
    model: nn.Module,
    sizes: ModelSizes,
    shape: MeshShape,
    setting: RunSetting,
    batch: Any,
    *,
    loss: Loss | None = None,
    half: torch.dtype | None = None,
) -> MeshSizes:
    """Return the part of a model of the given ``sizes`` on one rank of a mesh; activations need a ``batch``.

    Copies of some modules are called, as when the model is prepared; the model is unchanged.
    """
    layers = plan_division(model, shape.tp) if shape.tp > 1 else None
    stages = plan_stages(model, shape.pp) if shape.pp > 1 else None
    experts = plan_experts(model, shape.ep) if shape.ep > 1 else []
    refused = refuse_blocks(model, shape.cp) if shape.cp > 1 else None
    refused = next((found for found in (layers, stages, experts, refused) if isinstance(found, Refusal)), None)
    if refused is None and isinstance(layers, DivisionPlan) and not layers.groups:
        refused = Refusal(f"mesh.tp {shape.tp} finds no layers to divide", "train with --tp 1")
    if refused is not None:
        return MeshSizes(shape, sizes, sizes, refusal=refused.reason)
    layers = layers if isinstance(layers, DivisionPlan) else None
    stages = stages if isinstance(stages, StagePlan) else None
    experts = experts if isinstance(experts, list) else []
    with_experts, without = (
        _sizes_of_largest_rank(model, sizes, shape, layers, stages, divided) for divided in (experts, [])
    )
    mesh_sizes = MeshSizes(shape, with_experts, without)
    is_shared = setting.samples_per_rank < setting.batch_size
    num_samples = -(-setting.batch_size * shape.size // setting.world) if is_shared else setting.samples_per_rank
    if batch is None or not num_samples:
        return mesh_sizes
    options: dict[str, Any] = {"loss": loss, "half": half, "on_gpu": not setting.uses_host_memory}
    divided_modules = [] if layers is None else [group.owner for group in layers.groups]
    blocks = list(find_blocks(model)) if stages is None else list(stages.blocks)
    try:
        return _with_activations(
            mesh_sizes, model, batch, num_samples, divided_modules, blocks, experts, stages, options
        )
    except MisuseError:
        return mesh_sizes


def _sizes_of_largest_rank(
    model: nn.Module,
    sizes: ModelSizes,
    shape: MeshShape,
    layers: DivisionPlan | None,
    stages: StagePlan | None,
    experts: list[str],
) -> ModelSizes:
    """Return the weights of the rank with the most bytes of weights."""
    # By parameter: the dim along which it is divided, and into how many parts.
    dims = {} if layers is None else divided_parameters(model, layers.groups)
    divided = {key: (dim, shape.tp) for key, dim in dims.items()}
    divided |= {id(value): (0, shape.ep) for name in experts for value in model.get_submodule(name).parameters()}
    staged = {} if stages is None else staged_parameters(model, stages)
    by_stage: dict[int | None, list[Any]] = {}
    for weight, value in zip(sizes.weights, model.parameters(), strict=True):
        if id(value) in divided:
            dim, divisor = divided[id(value)]
            part = [*weight.shape]
            part[dim] = -(-part[dim] // divisor)
            weight = replace(weight, shape=tuple(part), state_bytes=-(-weight.state_bytes // divisor))
        by_stage.setdefault(staged.get(id(value)), []).append(weight)
    common = by_stage.pop(None, [])
    largest = max(
        by_stage.values(), key=lambda stage: sum(weight.num_values * weight.itemsize for weight in stage), default=[]
    )
    weights = (*common, *largest)
    share = sum(weight.num_values for weight in weights) / max(1, sizes.num_parameters)
    return replace(sizes, weights=weights, step_bytes=math.ceil(sizes.step_bytes * share))


def _with_activations(
    mesh_sizes: MeshSizes,
    model: nn.Module,
    batch: Any,
    num_samples: int,
    divided_modules: list[str],
    blocks: list[str],
    experts: list[str],
    stages: StagePlan | None,
    options: dict[str, Any],
) -> MeshSizes:
    shape = mesh_sizes.shape
    outputs: dict[str, Any] = {}
    total = measure_activations(
        model,
        batch,
        num_samples,
        adapt=_record_outputs_of(outputs, ["", *divided_modules, *blocks, *experts]),
        **options,
    )
    in_layers = total.num_bytes - _activation_bytes_without(
        divided_modules, outputs, total, model, batch, num_samples, options
    )
    in_blocks = total.num_bytes - _activation_bytes_without(blocks, outputs, total, model, batch, num_samples, options)
    in_stage = 1.0
    if stages is not None:
        in_stage = max(len(stages.range_of(stage)) for stage in range(shape.pp)) / len(stages.blocks)
    share = in_stage / shape.cp
    saved = in_layers * (1 - 1 / shape.tp)
    rest = total.num_bytes - in_blocks if shape.cp * shape.pp > 1 else 0
    kept = rest + (total.num_bytes - rest - saved) * share
    checkpointed = None
    if any(weight.block for weight in mesh_sizes.model.weights):
        checkpointed = measure_activations(model, batch, num_samples, checkpoints=True, **options)
    factor = kept / max(1, total.num_bytes)
    return replace(
        mesh_sizes,
        activations=_scaled(total, factor),
        checkpointed=None if checkpointed is None else _scaled(checkpointed, factor),
        sent_bytes=_sent_bytes(mesh_sizes, outputs, divided_modules, blocks, experts, in_stage),
    )


def _sent_bytes(
    mesh_sizes: MeshSizes,
    outputs: dict[str, Any],
    divided_modules: list[str],
    blocks: list[str],
    experts: list[str],
    in_stage: float,
) -> int:
    """Estimate the bytes that a rank sends in a step: activations, and gradients of weights outside of the stages."""
    shape, sent = mesh_sizes.shape, 0.0
    if shape.tp > 1:  # two sums, forward and backward
        sent += (
            4 * sum(map(_output_bytes, map(outputs.get, divided_modules))) * (1 - 1 / shape.tp) * in_stage / shape.cp
        )
    if shape.cp > 1:  # queries, keys, values and results both ways; the output, and the gradient of the input
        sent += sum(map(_output_bytes, map(outputs.get, blocks))) * (1 - 1 / shape.cp) * (8 / shape.cp + 2)
    if shape.pp > 1:  # to the next stage, and the gradient to the one before; the last stage sends the outputs
        sent += _output_bytes(outputs.get(blocks[0])) * (2 if shape.pp > 2 else 1) + _output_bytes(outputs.get(""))
        common = sum(
            weight.num_values * weight.itemsize
            for weight in mesh_sizes.model.weights
            if weight.is_trainable and weight.block is None
        )
        sent += 2 * common * (1 - 1 / shape.pp)
    if shape.ep > 1:  # tokens and results of each chosen expert, and their gradients
        recorded = [outputs[name] for name in experts if name in outputs]
        sent += 4 * sum(_output_bytes(found) * found[2] for found in recorded) * (1 - 1 / shape.ep)
    return math.ceil(sent)


def _record_outputs_of(outputs: dict[str, Any], names: list[str]) -> Callable[[nn.Module], None]:
    """Return a function that makes a model record, by name, the outputs of some of its modules as meta tensors."""

    def adapt(model: nn.Module) -> None:
        for name in names:
            model.get_submodule(name).register_forward_hook(
                lambda _, args, kwargs, output, name=name: outputs.__setitem__(
                    name,
                    (
                        _meta_copy(chain_input(args, kwargs)),
                        map_tensors(_meta_copy, output),
                        _experts_per_token(args, kwargs),
                    ),
                ),
                with_kwargs=True,
            )

    return adapt


def _experts_per_token(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return how many experts compute num_samples token, if these are the arguments of a module of experts."""
    given = [*args, *kwargs.values()][1:2]
    return given[0].shape[-1] if given and isinstance(given[0], Tensor) and given[0].dim() else 0


def _meta_copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _output_bytes(recorded: Any) -> int:
    return sum(value.nbytes for value in find_tensors(recorded[1])) if recorded is not None else 0


def _activation_bytes_without(
    names: list[str],
    outputs: dict[str, Any],
    total: Activations,
    model: nn.Module,
    batch: Any,
    num_samples: int,
    options: dict[str, Any],
) -> int:
    """Return the bytes of activations if the modules whose outputs have the shape of their inputs returned these."""
    skipped = [name for name in names if name in outputs and _keeps_shape(*outputs[name][:2])]
    if not skipped:
        return total.num_bytes

    def adapt(copied: nn.Module) -> None:
        for name in skipped:
            inputs, output, _ = outputs[name]
            copied.get_submodule(name).forward = _identity_forward(inputs, output)

    return min(total.num_bytes, measure_activations(model, batch, num_samples, adapt=adapt, **options).num_bytes)


def _keeps_shape(inputs: Tensor | None, output: Any) -> bool:
    first = next(find_tensors(output), None)
    return inputs is not None and first is not None and inputs.shape == first.shape and inputs.dtype == first.dtype


def _identity_forward(inputs: Tensor, output: Any) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        given: Any = chain_input(args, kwargs)
        return map_tensors(
            lambda form: given.view_as(given) if form.shape == inputs.shape else torch.empty(form.shape, device="cpu"),
            output,
        )

    return forward


def _scaled(activations: Activations, factor: float) -> Activations:
    cast = activations.cast_bytes
    return Activations(
        math.ceil(activations.num_bytes * factor),
        activations.weight_copies,
        None if cast is None else math.ceil(cast * factor),
    )
