"""Limits of DeepSpeed; models and optimizers are checked before anything is sharded."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.optim import Optimizer

from accel_nb.config.sections import DeepspeedOptions
from accel_nb.runtime.tensors.instance_patching import innermost_class
from accel_nb.runtime.tensors.stepped import stepped_parameters
from accel_nb.strategies.base import Refusal

STEPPED_DTYPE = torch.float32
"""The only dtype of weights that DeepSpeed steps here."""

_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD, torch.optim.Adadelta,
)  # fmt: skip


def models_stepped_by(optimizer: Optimizer, models: Iterable[nn.Module]) -> tuple[list[nn.Module], set[int]]:
    """Return the models that an optimizer trains in part, and the trained parameters, by id."""
    owned = {id(value) for value in stepped_parameters(optimizer) if value.requires_grad}
    return [model for model in models if any(id(value) in owned for value in model.parameters())], owned


def find_refusals(
    options: DeepspeedOptions,
    models: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    known_models: Iterable[nn.Module] = (),
    known_optimizers: Iterable[Optimizer] = (),
) -> Iterator[Refusal]:
    """Yield the reasons why models and optimizers cannot be sharded together, or with the known ones."""
    new, known = list(optimizers), list(known_optimizers)
    models = list(models)
    for model in models:
        yield from _of_model(model, options)
    every = [*known_models, *models]
    for number, optimizer in enumerate(new):
        yield from _of_optimizer(optimizer, every, [*known, *new[:number]], options)


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is of a known class, or of a subclass with the same ``step``."""
    own = inspect.unwrap(innermost_class(optimizer).step)  # torch wraps it at the first instance
    return any(own is inspect.unwrap(kind.step) for kind in _ELEMENTWISE)


def _of_model(model: nn.Module, options: DeepspeedOptions) -> Iterator[Refusal]:
    kind = type(model).__name__
    if options.zero_stage == 3 and (isinstance(model, OptimizedModule) or model._compiled_call_impl is not None):
        yield Refusal(
            "a model is compiled by torch.compile, in whose calls stage 3 cannot gather parameters",
            "leave torch.compile out, or use --zero-stage 2",
        )
    for name, value in model.named_parameters():
        if value.is_meta and (options.weights is None or options.zero_stage < 3):
            yield Refusal(
                f"{name} of the {kind} has no values (it is on the meta device)",
                "load its weights before preparing it, or use --zero-stage 3 and name the safetensors to fill it from "
                "with deepspeed.weights",
            )
        if options.zero_stage == 3 and not value.dim():
            yield Refusal(
                f"{name} of the {kind} is a single number, which stage 3 cannot shard",
                "give it one dim, as in nn.Parameter(torch.ones(1)), or use --zero-stage 2",
            )
        if value.requires_grad and value.dtype is not STEPPED_DTYPE:
            yield Refusal(
                f"{name} of the {kind} is {str(value.dtype).removeprefix('torch.')}, and DeepSpeed steps float32 "
                "weights",
                "call model.float() before preparing it, and choose what it computes in by --precision; ddp and fsdp "
                "take other formats",
            )


def _of_optimizer(
    optimizer: Optimizer, every: Iterable[nn.Module], others: Iterable[Optimizer], options: DeepspeedOptions
) -> Iterator[Refusal]:
    every = list(every)
    models, owned = models_stepped_by(optimizer, every)
    kind = type(optimizer).__name__
    if models and not _is_elementwise(optimizer) and not options.allow_untested_optimizer:
        known = ", ".join(item.__name__ for item in _ELEMENTWISE)
        yield Refusal(
            f"{kind} is not known to treat each element of a parameter by itself, and DeepSpeed splits parameters "
            "at any element",
            f"use one of {known}, set deepspeed.allow_untested_optimizer if it does, or train by fsdp",
        )
    held = {id(value) for model in every for value in model.parameters()}
    if models and (outside := [value for value in stepped_parameters(optimizer) if id(value) not in held]):
        yield Refusal(
            f"the {kind} steps a tensor of shape {tuple(outside[0].shape)} that is in none of the prepared models, and "
            "DeepSpeed steps parameters of models only",
            "make it an nn.Parameter of the model, give it an optimizer of its own, or train by ddp or fsdp",
        )
    if options.zero_stage == 3 and len(models) > 1:
        yield Refusal(
            f"one {kind} steps {len(models)} models, which stage 3 does not support",
            "put them into one module, give each an optimizer, or use --zero-stage 2",
        )
    for model, other in itertools.product(models, others):
        theirs = models_stepped_by(other, every)[1]
        shared = [name for name, value in model.named_parameters() if id(value) in theirs]
        if shared and options.zero_stage == 3:
            yield Refusal(
                f"two optimizers step the {type(model).__name__}, and stage 3 shards all of a model for one",
                "use --zero-stage 2, give one optimizer two groups of parameters, or train by ddp or fsdp",
            )
        named = dict(model.named_parameters())
        twice = [name for name in shared if id(named[name]) in owned]
        if twice:
            yield Refusal(
                f"two optimizers step {twice[0]} of the {type(model).__name__}, and DeepSpeed shards a parameter for "
                "one",
                "leave it to one of them, or train by ddp or fsdp",
            )
