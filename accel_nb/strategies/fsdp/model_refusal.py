"""Detection of models that `fully_shard` cannot shard with the same result."""

from __future__ import annotations

import inspect

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import fully_shard

from accel_nb.strategies.base import Refusal


def find_refusal(model: nn.Module, weights: str | None) -> Refusal | None:
    """Return the reason if a model cannot be sharded; None if it can."""
    empty = next((name for name, value in model.named_parameters() if value.is_meta), None)
    if empty is not None and weights is None:
        return Refusal(
            f"{empty} of the {type(model).__name__} has no values (it is on the meta device)",
            "load its weights before preparing it, or name the safetensors to fill it from with fsdp.weights",
        )
    single = next((name for name, value in model.named_parameters() if value.dim() == 0), None)
    if single is not None and "ignored_params" not in inspect.signature(fully_shard).parameters:
        return Refusal(
            f"{single} of the {type(model).__name__} is a single number, which this PyTorch cannot shard",
            "give it one dim, as in nn.Parameter(torch.ones(1)), or use PyTorch 2.7 or newer",
        )
    hooked = next(
        (
            name
            for name, value in model.named_parameters()
            if value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)
        ),
        None,
    )
    if hooked is not None:
        return Refusal(
            f"{hooked} of the {type(model).__name__} has a hook on its gradient, of which each rank gets a shard only",
            "remove the hook, or train with --strategy ddp, which holds copies",
        )
    if isinstance(model, nn.ModuleList | nn.ModuleDict) and type(model).forward is nn.Module.forward:
        return Refusal(
            f"a {type(model).__name__} is not called itself, and parameters are gathered when a model is called",
            "make it a part of a module with a forward, or train with --strategy ddp, which holds copies",
        )
    sets_elsewhere = type(model).__setattr__ is not nn.Module.__setattr__
    if sets_elsewhere and not isinstance(model, OptimizedModule | nn.RNNBase) and any(True for _ in model.parameters()):
        return Refusal(
            f"{type(model).__name__} passes attributes that are set on it to another module, and FSDP2 sets attributes "
            "on what it divides",
            "prepare the module inside of it (leave out fabric.setup, if it is Lightning Fabric's), "
            "or train with --strategy ddp",
        )
    sparse = next((name for name, module in model.named_modules() if getattr(module, "sparse", None) is True), None)
    if sparse is not None:
        return Refusal(
            f"{sparse or type(model).__name__} has sparse gradients, which cannot be divided",
            "make it with sparse=False, or train with --strategy ddp, which holds copies",
        )
    return None
