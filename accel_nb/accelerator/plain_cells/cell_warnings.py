"""Warnings of a plain cell: parts of it are not divided among the workers, or its result may differ from one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_nb.accelerator.core import Accelerator
from accel_nb.accelerator.prepare.preparer import is_prepared
from accel_nb.runtime.distributed.gradients import is_in_no_module, is_only_in_plain_modules
from accel_nb.runtime.process.user_code import is_called_by_accelerator, is_called_by_user, warn_at_user_line
from accel_nb.runtime.world import World

ALTERNATIVES = (
    "`--batch per-worker` gives each worker a whole batch, one worker (`--strategy single --cpus 1`, or `--gpus 1`) "
    "computes what one device does"
)


@contextmanager
def warn_if_unprepared(world: World) -> Iterator[None]:
    """Warn, if there are several ranks, when the first optimizer that the user's code steps is not prepared."""
    has_stepped = world.size == 1 or not world.is_main

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal has_stepped
        if has_stepped or not is_called_by_user():
            return
        has_stepped = True
        if not is_called_by_accelerator():
            warn_at_user_line(
                f"this cell mentions `accelerator`, so it runs as written, and its {type(optimizer).__name__} is not "
                "prepared: every worker trains alone, with all of the data. Call accelerator.prepare(model, optimizer, "
                "loader), or leave `accelerator` out of the cell"
            )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def library_step_check(accelerator: Accelerator) -> Callable[..., None]:
    """Return an optimizer step pre-hook that warns once if a library trains the whole model on each worker."""
    is_checked = accelerator.num_processes == 1 or not accelerator.is_main_process

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal is_checked
        if is_checked or is_prepared(optimizer) or is_called_by_user():
            return
        is_checked = True
        first = next((value for group in optimizer.param_groups for value in group["params"]), None)
        if first is None:
            return
        # DeepSpeed steps an optimizer of flat copies for a prepared one.
        if not accelerator.has_optimizers and is_in_no_module(first):
            _warn(
                accelerator,
                f"a library steps its own {type(optimizer).__name__} for tensors in no module: every worker trains "
                "them alone, with all of the data. The result is that of one device, but no faster. Those that only "
                "the library holds, as Pyro's parameter store does, stay on the workers, where later cells find them: "
                "read them in such a cell",
            )
        if not is_only_in_plain_modules(first):
            return
        _warn(
            accelerator,
            f"a library steps its own {type(optimizer).__name__}: every worker trains alone, with all of the data. The "
            "result is that of one device, but no faster. Set the library's own number of processes to the number of "
            "workers (Lightning: devices=N, strategy='ddp'), or write the loop in the cell",
        )

    return check


def warn_unprepared_model(accelerator: Accelerator) -> None:
    """Warn that an optimizer steps parameters of no prepared model."""
    _warn(
        accelerator,
        "an optimizer was made for a model that was not found and so is not prepared: every worker trains it alone, "
        "with all of the data. Bind the model to a name of the cell, or of the function that trains it",
    )


def warn_lazy_model(accelerator: Accelerator, name: str) -> None:
    """Warn that a model has lazy layers, and so is not divided in the statement that calls it first."""
    _warn(
        accelerator,
        f"{name} has lazy layers, which create their parameters in its first call: until the statement with that call "
        "has ended, every worker computes all of it: the result is that of one device, but no faster. Call the model "
        "with a batch in a statement before the training",
    )


def warn_tensors_without_module(accelerator: Accelerator, names: Sequence[str]) -> None:
    """Warn that tensors in no module are trained."""
    _warn(
        accelerator,
        f"{', '.join(names)}: these tensors require gradients and belong to no module, so every worker reads all "
        "batches of the loader and trains them with all of the data: the result is that of one device, but no faster. "
        "Make them parameters of a module to divide the work",
    )


def warn_unproven_loss(accelerator: Accelerator, problem: str) -> None:
    """Warn that a loss may not be a sum or a mean over samples; ``problem`` is the reason."""
    _warn(
        accelerator,
        f"this loss is not proven to be a sum or a mean over samples ({problem}): each worker computes it from its own "
        f"share of the batch, which may differ from one device. {ALTERNATIVES}",
    )


def warn_random_numbers(accelerator: Accelerator) -> None:
    """Warn that each worker draws its own random numbers for its share of a batch."""
    _warn(
        accelerator,
        "random numbers are drawn for each batch (noise, augmentation, sampling): each worker draws its own, so the "
        "result differs from that of one device, as with another seed",
    )


def warn_unequal_batches(accelerator: Accelerator) -> None:
    """Warn that the ranks read different batches, so that models cannot divide the rows of one batch."""
    _warn(
        accelerator,
        "the workers read different samples from the same loader, since its dataset draws random numbers from a source "
        "of its own: each computes its own batches, and gradients are averaged, which differs from one device. Seed "
        "the generators that the dataset makes, or use those of random, numpy or torch",
    )


def warn_unequal_values(accelerator: Accelerator, name: str) -> None:
    """Warn that the ranks compute ``name``, a model or the loss, from different values."""
    _warn(
        accelerator,
        f"the workers compute {name} from different values, such as random numbers of a source of their own: each "
        "computes its own, and gradients are averaged, which differs from one device. Seed what draws them, or draw "
        "from random, numpy or torch",
    )


def warn_rows_differ(accelerator: Accelerator, name: str, num_calls: int, reason: str) -> None:
    """Warn that calls of a model were divided among the workers before a check showed that this changes the result."""
    _warn(
        accelerator,
        f"earlier calls of {name} ({num_calls}) were divided among the workers, but {reason}: their results may differ "
        "from one device. From now on every worker computes the whole batch; with `--divide none` all calls do",
    )


def warn_changed_buffers(accelerator: Accelerator) -> None:
    """Warn that a forward pass changes buffers by values that depend on the share of the batch."""
    _warn(
        accelerator,
        "the model changes buffers in its forward pass (running statistics, codebooks): those of the first worker, "
        f"computed from its share of each batch, are kept, and may differ from one device. {ALTERNATIVES}",
    )


def warn_unequal_shares(accelerator: Accelerator) -> None:
    """Warn that a step used batches of several loaders that were not divided in the same proportion."""
    _warn(
        accelerator,
        "a step used batches of several loaders that were divided in different proportions, as short last batches "
        "are, and a loss has one weight for all of them: it may differ from one device. drop_last=True, or "
        f"batch sizes that the number of workers divides, avoid that; {ALTERNATIVES}",
    )


def warn_gradient_hooks(accelerator: Accelerator) -> None:
    """Warn that hooks receive the gradients of one share only."""
    _warn(
        accelerator,
        "hooks on gradients run on each worker before the workers' gradients are averaged: they read or change the "
        f"gradients of one share of the batch, and the result may differ from one device. {ALTERNATIVES}",
    )


def warn_evaluation_mode(accelerator: Accelerator) -> None:
    """Warn that a loop trains a model in evaluation mode, and that its first epoch was not divided."""
    _warn(
        accelerator,
        "this loop trains while the model is in evaluation mode, so every worker reads all batches of this epoch: the "
        "result is that of one device, but no faster. Its next epochs are divided; model.train() before the loop "
        "divides this one too",
    )


def warn_gathered_counts(accelerator: Accelerator) -> None:
    """Warn that a library gathers metrics of whole batches, since the cell has read shares too."""
    number = accelerator.num_processes
    _warn(
        accelerator,
        "loops with `--divide data` have read shares, so metrics are gathered from all workers, also those of whole "
        "batches that every worker has counted: their means and rates are right, their sums and counts are "
        f"{number} times those of one device. Evaluate in a cell without `--divide data`",
    )


def warn_undivided_loader(accelerator: Accelerator) -> None:
    """Warn that the loader of a loop that trains is not divided."""
    _warn(
        accelerator,
        "every worker read all batches of the loader, since no call of backward was found in the code that iterates "
        "it: the result is that of one device, but no faster. Iterate the loader in the function, or the "
        "top-level statement, that calls loss.backward()",
    )


def warn_gradients_left(accelerator: Accelerator) -> None:
    """Warn that a cell ended with gradients that no step has used, if a model has some."""
    stepper = accelerator.components.stepper
    parameters = (value for model in stepper.bundle.models for value in model.parameters())
    holder = stepper.gradient_holder
    if holder.has_gradients if holder is not None else any(value.grad is not None for value in parameters):
        _warn(
            accelerator,
            "this cell ended after a backward pass without a step: the gradients of its models stay on the workers, "
            "where the next cell that runs on them finds them. In the notebook `.grad` of a model is not updated: read "
            "or use gradients in a cell on the workers",
        )


def warn_background_process(world: World) -> None:
    """Warn that each worker starts a process that runs in the background."""
    _warn_on_main(
        world,
        f"each of the {world.size} workers starts this process, since it runs beside the cell: what it writes is "
        f"written {world.size} times. `subprocess.run` runs a command once; start a process that "
        "keeps running in a cell without %%accelerate",
    )


def _warn(accelerator: Accelerator, message: str) -> None:
    _warn_on_main(accelerator.components.world, message)


def _warn_on_main(world: World, message: str) -> None:
    """Warn on rank 0, if there are several."""
    if world.is_main and world.size > 1:
        warn_at_user_line(message)
