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

    ``communication_buffers`` are the buffers of collectives: gathered blocks, and gradients that are being reduced.
    ``step`` are temporary tensors of the optimizer's step, which runs after activations are freed. ``sent_bytes`` are
    about the bytes that the rank sends in a step; they take no memory.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    communication_buffers: int = 0
    step: int = 0
    host: int = 0
    sent_bytes: int = 0

    @property
    def total(self) -> int:
        """The peak on the device: at the end of the forward pass, or in the optimizer's step."""
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + max(self.activations + self.communication_buffers, self.step)
        )


def estimate(
    model: ModelSizes,
    layout: Layout,
    world: int,
    *,
    is_half: bool = False,
    activations: Activations = NO_ACTIVATIONS,
    ranks_per_replica: int | None = None,
) -> MemoryUsage:
    """Return the memory of each of ``world`` ranks under a layout; of uneven shares that of rank 0, the largest.

    ``is_half``: the run computes in bf16 or fp16. ``ranks_per_replica`` is how many ranks share one copy of the
    model, None for all; flat partitions always use all. Frozen weights have neither gradients nor state.
    """
    if layout.sharding == "torch":
        return _estimate_replicated(model, activations, world)
    if layout.sharding == "blocks":
        usage = _estimate_fully_sharded(model, layout, world, ranks_per_replica or world, is_half)
    else:
        usage = _estimate_zero(model, layout, world)
    saved = activations.num_bytes + (activations.weight_copies if layout.sharding == "flat" else 0)
    if is_half and layout.sharding == "blocks" and activations.cast_bytes is not None:
        saved = activations.cast_bytes
    parameters, gradients, optimizer, step, host = usage.parameters, usage.gradients, usage.optimizer, usage.step, 0
    if layout.offloads_parameters:
        host, parameters = host + parameters - model.buffer_bytes, model.buffer_bytes
    if layout.offloads_optimizer:
        host, gradients, optimizer, step = host + gradients + optimizer, 0, 0, 0
    return MemoryUsage(
        parameters, gradients, optimizer, saved, usage.communication_buffers, step, host, usage.sent_bytes
    )


def _estimate_replicated(model: ModelSizes, activations: Activations, world: int) -> MemoryUsage:
    """Return the usage with full replicas. DDP's buckets are the gradients themselves (``gradient_as_bucket_view``)."""
    gradients = sum(map(_weight_bytes, _trained(model)))
    return MemoryUsage(
        parameters=sum(map(_weight_bytes, model.weights)) + model.buffer_bytes,
        gradients=gradients,
        optimizer=sum(weight.state_bytes for weight in model.weights),
        activations=activations.num_bytes + activations.weight_copies,
        step=model.step_bytes,
        sent_bytes=_bytes_sent(2 * gradients, world),
    )


def _bytes_sent(num_bytes: int, ranks: int) -> int:
    """Return the bytes that one of ``ranks`` sends if it sends its share of ``num_bytes`` to each of the others."""
    return num_bytes * (ranks - 1) // ranks


def _estimate_fully_sharded(
    model: ModelSizes, layout: Layout, world: int, ranks_per_replica: int, is_half: bool
) -> MemoryUsage:
    """Return the usage under FSDP2: weights are sharded along the first dim, and gathered block by block."""
    shares = {weight.name: _values_per_rank(weight, ranks_per_replica) for weight in model.weights}
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
    gathers = 2 if layout.shards_parameters else 1
    between_copies = _bytes_sent(2 * gradients // ranks_per_replica, max(1, world // ranks_per_replica))
    gathered = full_sizes[None] + (sum(blocks[:2]) if layout.shards_parameters else sum(blocks))
    return MemoryUsage(
        parameters=sum(shares[weight.name] * weight.itemsize for weight in model.weights) + model.buffer_bytes,
        gradients=sum(shares[weight.name] * weight.itemsize for weight in _trained(model)),
        optimizer=sum(
            math.ceil(weight.state_bytes * shares[weight.name] / max(1, weight.num_values)) for weight in model.weights
        ),
        activations=0,
        communication_buffers=gathered + max(gradient_buffers.values()) if world > 1 or layout.offloads else 0,
        step=math.ceil(model.step_bytes / ranks_per_replica),
        sent_bytes=_bytes_sent(gradients + gathers * sum(full_sizes.values()), ranks_per_replica) + between_copies,
    )


def _estimate_zero(model: ModelSizes, layout: Layout, world: int) -> MemoryUsage:
    """Return the usage under ZeRO: weights are flattened into one float32 tensor that is partitioned equally.

    ``optimizer`` includes the float32 copy of the weights that is stepped, unless the rank steps its own partition.
    """
    trained = sum(weight.num_values for weight in _trained(model))
    parameters, gradients = sum(map(_weight_bytes, model.weights)), trained * FLOAT_BYTES
    state = sum(weight.state_bytes * FLOAT_BYTES // weight.itemsize for weight in _trained(model))
    copies = 0 if layout.shards_parameters and not layout.offloads else trained * FLOAT_BYTES
    return MemoryUsage(
        parameters=(math.ceil(parameters / world) if layout.shards_parameters else parameters) + model.buffer_bytes,
        gradients=math.ceil(gradients / world) if layout.shards_gradients else gradients,
        optimizer=math.ceil((copies + state) / world),
        activations=0,
        communication_buffers=min(trained, ZERO_BUCKET_VALUES) * FLOAT_BYTES,
        step=math.ceil(model.step_bytes / world),
        sent_bytes=_bytes_sent(trained * FLOAT_BYTES + (2 if layout.shards_parameters else 1) * parameters, world),
    )


def _trained(model: ModelSizes) -> list[WeightSize]:
    return [weight for weight in model.weights if weight.is_trainable]


def _weight_bytes(weight: WeightSize) -> int:
    return weight.num_values * weight.itemsize


def _values_per_rank(weight: WeightSize, world: int) -> int:
    """Return how many values of a weight each rank stores if the weight is divided along its first dimension."""
    rows, *rest = weight.shape or (1,)
    return math.ceil(rows / world) * math.prod(rest)
