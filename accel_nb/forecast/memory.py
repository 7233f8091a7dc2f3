"""The bytes that a training takes on each rank, by kind: plain arithmetic, imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from accel_nb.forecast.layouts import Layout
from accel_nb.forecast.sizes import ModelSizes, WeightSize

HALF_BYTES = 2
FLOAT_BYTES = 4
ZERO_BUCKET_VALUES = 500_000_000
"""DeepSpeed's default ``reduce_bucket_size`` and ``allgather_bucket_size``, in values."""


@dataclass(frozen=True, slots=True)
class Activations:
    """Peak memory of one forward and backward pass beside weights and gradients, in bytes.

    ``num_bytes`` is for ranks that compute in the weights' own type or, in half precision, under autocast;
    ``weight_copies`` are the bytes that autocast's cached copies of weights in half precision add to the peak, at
    which not all copies exist. ``cast_bytes`` is for a model that was cast; None if that cannot be run: then
    ``num_bytes`` is used.
    """

    num_bytes: int
    weight_copies: int = 0
    cast_bytes: int | None = None


NO_ACTIVATIONS = Activations(0)


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Peak memory of one rank's device, in bytes; ``host`` is its offloaded memory on the machine.

    ``exchange`` are the buffers of collectives: gathered blocks, and gradients that are being reduced. ``step`` are
    temporary tensors of the optimizer's step, which runs after activations are freed. ``messages`` are about the bytes
    that the rank sends in a step; they take no memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    exchange: int = 0
    step: int = 0
    host: int = 0
    messages: int = 0

    @property
    def total(self) -> int:
        """The peak on the device: at the end of the forward pass, or in the optimizer's step."""
        return self.parameters + self.gradients + self.optimizer + max(self.activations + self.exchange, self.step)


def estimate(
    model: ModelSizes,
    layout: Layout,
    world: int,
    *,
    is_half: bool = False,
    activations: Activations = NO_ACTIVATIONS,
    copy_ranks: int | None = None,
) -> MemoryUsage:
    """Return the memory of each of ``world`` ranks under a layout; of uneven shares that of rank 0, the largest.

    ``is_half``: the run computes in bf16 or fp16. ``copy_ranks`` is how many ranks share one copy of the
    model, None for all; flat partitions always use all. Frozen weights have neither gradients nor state.
    """
    if layout.engine == "torch":
        return _replicated(model, activations, world)
    if layout.engine == "blocks":
        usage = _by_block(model, layout, world, copy_ranks or world, is_half)
    else:
        usage = _flat(model, layout, world)
    kept = activations.num_bytes + (activations.weight_copies if layout.engine == "flat" else 0)
    if is_half and layout.engine == "blocks" and activations.cast_bytes is not None:
        kept = activations.cast_bytes
    parameters, gradients, optimizer, step, host = usage.parameters, usage.gradients, usage.optimizer, usage.step, 0
    if layout.offloads_parameters:
        host, parameters = host + parameters - model.buffer_bytes, model.buffer_bytes
    if layout.offloads_optimizer:
        host, gradients, optimizer, step = host + gradients + optimizer, 0, 0, 0
    return MemoryUsage(parameters, gradients, optimizer, kept, usage.exchange, step, host, usage.messages)


def _replicated(model: ModelSizes, activations: Activations, world: int) -> MemoryUsage:
    """Compute for full replicas. DDP's buckets are the gradients themselves (``gradient_as_bucket_view``)."""
    gradients = sum(map(_weight_bytes, _trained(model)))
    return MemoryUsage(
        parameters=sum(map(_weight_bytes, model.weights)) + model.buffer_bytes,
        gradients=gradients,
        optimizer=sum(weight.state_bytes for weight in model.weights),
        activations=activations.num_bytes + activations.weight_copies,
        step=model.step_bytes,
        messages=_sent(2 * gradients, world),
    )


def _sent(num_bytes: int, ranks: int) -> int:
    """Return the bytes that a rank sends if its part of them goes to each of the others."""
    return num_bytes * (ranks - 1) // ranks


def _by_block(model: ModelSizes, layout: Layout, world: int, copy_ranks: int, is_half: bool) -> MemoryUsage:
    """Compute for weights divided along the first dimension, padded to equal parts; whole blocks are gathered."""
    shares = {weight.name: _values_per_rank(weight, copy_ranks) for weight in model.weights}
    full_sizes: dict[str | None, int] = {None: 0}
    gradient_buffers: dict[str | None, int] = {None: 0}  # full gradients, and their copy in rank order
    for weight in model.weights:
        size = weight.num_values * (min(HALF_BYTES, weight.itemsize) if is_half else weight.itemsize)
        full_sizes[weight.block] = full_sizes.get(weight.block, 0) + size
        if weight.is_trainable:
            copied = weight.num_values * max(FLOAT_BYTES, weight.itemsize) if is_half else size  # averaged in float32
            gradient_buffers[weight.block] = gradient_buffers.get(weight.block, 0) + size + copied
    blocks = sorted((size for block, size in full_sizes.items() if block is not None), reverse=True)
    averaged = [max(FLOAT_BYTES, weight.itemsize) if is_half else weight.itemsize for weight in _trained(model)]
    gradients = sum(size * weight.num_values for size, weight in zip(averaged, _trained(model), strict=True))
    gathers = 2 if layout.divides_parameters else 1
    between_copies = _sent(2 * gradients // copy_ranks, max(1, world // copy_ranks))
    gathered = full_sizes[None] + (sum(blocks[:2]) if layout.divides_parameters else sum(blocks))
    return MemoryUsage(
        parameters=sum(shares[weight.name] * weight.itemsize for weight in model.weights) + model.buffer_bytes,
        gradients=sum(shares[weight.name] * weight.itemsize for weight in _trained(model)),
        optimizer=sum(
            math.ceil(weight.state_bytes * shares[weight.name] / max(1, weight.num_values)) for weight in model.weights
        ),
        activations=0,
        exchange=gathered + max(gradient_buffers.values()) if world > 1 or layout.offloads else 0,
        step=math.ceil(model.step_bytes / copy_ranks),
        messages=_sent(gradients + gathers * sum(full_sizes.values()), copy_ranks) + between_copies,
    )


def _flat(model: ModelSizes, layout: Layout, world: int) -> MemoryUsage:
    """Compute for weights flattened into one tensor in float32 and divided into equal parts.

    ``optimizer`` includes the float32 copy of the weights that is stepped, unless the rank steps its own partition.
    """
    trained = sum(weight.num_values for weight in _trained(model))
    parameters, gradients = sum(map(_weight_bytes, model.weights)), trained * FLOAT_BYTES
    state = sum(weight.state_bytes * FLOAT_BYTES // weight.itemsize for weight in _trained(model))
    copies = 0 if layout.divides_parameters and not layout.offloads else trained * FLOAT_BYTES
    return MemoryUsage(
        parameters=(math.ceil(parameters / world) if layout.divides_parameters else parameters) + model.buffer_bytes,
        gradients=math.ceil(gradients / world) if layout.divides_gradients else gradients,
        optimizer=math.ceil((copies + state) / world),
        activations=0,
        exchange=min(trained, ZERO_BUCKET_VALUES) * FLOAT_BYTES,
        step=math.ceil(model.step_bytes / world),
        messages=_sent(trained * FLOAT_BYTES + (2 if layout.divides_parameters else 1) * parameters, world),
    )


def _trained(model: ModelSizes) -> list[WeightSize]:
    return [weight for weight in model.weights if weight.is_trainable]


def _weight_bytes(weight: WeightSize) -> int:
    return weight.num_values * weight.itemsize


def _values_per_rank(weight: WeightSize, world: int) -> int:
    """Return how many values of a weight each rank stores if the weight is divided along its first dimension."""
    rows, *rest = weight.shape or (1,)
    return math.ceil(rows / world) * math.prod(rest)
