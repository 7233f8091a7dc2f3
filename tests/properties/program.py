"""One random program: the source of a plain notebook cell, and the names whose values are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.properties.choices import Choices
from tests.properties.data import INPUTS, make_data
from tests.properties.encoders import indent, pick_encoder
from tests.properties.interfaces import FLOATS, INTERFACES, pick_interface
from tests.properties.loops import (
    EPOCHS,
    ITERATIONS,
    NESTED,
    PLACES,
    STEPS,
    Parts,
    join,
    make_iteration,
    write_training,
)
from tests.properties.losses import LOSSES, REGULARISERS, Loss
from tests.properties.models import Context, Model
from tests.properties.training import Training, make_training

_HEADER = """\
import collections, contextlib, copy, dataclasses, itertools, math, random
import torch
import torch.nn.utils.parametrize, torch.utils.checkpoint
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.set_default_dtype(torch.float64)
torch.manual_seed({seed})"""


@dataclass(frozen=True)
class Program:
    """A cell, and the choices that it was made of."""

    number: int
    source: str
    compare: tuple[str, ...]
    choices: Mapping[str, str]
    options: Mapping[str, tuple[str, ...]]
    """The options that each choice had; the first is the simplest."""

    @property
    def unusual(self) -> dict[str, str]:
        """The choices that are not the simplest ones."""
        return {axis: option for axis, option in self.choices.items() if option != self.options[axis][0]}


def make_program(number: int, forced: Mapping[str, str] | None = None, *, is_simple: bool = False) -> Program:
    """Return the program of a number, with some of its choices replaced; ``is_simple`` makes all others simple."""
    choices = Choices(number, forced, is_simple=is_simple)
    inputs = choices.pick("inputs", *INPUTS, simple=0.45)
    interface = INTERFACES[pick_interface(choices, inputs)]
    loss = LOSSES["mse" if interface.has_own_loss else choices.pick("loss", *LOSSES, simple=0.02)]
    encoder = pick_encoder(choices, inputs)
    model = interface.make(Context(encoder, loss, inputs))
    smallest = max(2 if encoder.normalizes_batches else 1, model.min_batch, loss.min_batch)
    iterations = [name for name in ITERATIONS if _can_iterate(name, inputs, model, smallest)]
    how = choices.pick("iteration", *iterations, simple=0.4)
    has_batches = how not in ("full batch", "slices")
    can_step = has_batches and model.has_output and model.steps_alone and how not in ("zip", *NESTED)
    places = [name for name in PLACES if can_step or name not in STEPS]
    place = choices.pick("place", *places, simple=0.5)
    drops = model.needs_full_batches
    data = make_data(choices, inputs, loss, drops=drops, min_batch=smallest, is_iterated=has_batches)
    training = make_training(
        choices,
        model,
        num_steps=EPOCHS * data.num_batches,
        can_break=how not in ("full batch", "chunks") and place not in STEPS,
        can_accumulate=how not in ("full batch", *NESTED) and place not in STEPS,
    )
    iteration = make_iteration(how, data, needs_index=training.window > 1)
    parts = Parts(
        objects=[model.setup, model.setup_optimizers, *training.objects],
        state=["history = []", *training.state],
        before_epoch=["total, count = 0.0, 0", model.before_epoch, *training.before_epoch],
        after_batch=[*training.after_batch],
        after_epoch=["history.append(total / max(1, count))\nprint(epoch, history[-1])", *training.after_epoch],
        finish=[*training.finish],
        returns="loss" if training.uses_closure else "loss, out",
        models=model.names,
        compare=(*model.names, *training.names, "history"),
    )
    forward = join(*_forward(choices, inputs, loss, model, training), iteration.more_loss)
    parts.update = training.update(forward, iteration.count)
    _add_printing(choices, parts, model, loss)
    _add_evaluation(choices, parts, model, loss, data.unpack)
    source = join(_HEADER.format(seed=number), data.lines, model.classes, write_training(parts, iteration, place))
    return Program(number, source + "\n", parts.compare, choices.made, choices.options)


def single_choices() -> Iterator[Program]:
    """Return the simplest program of each kind of inputs, and one for each option that is the only unusual choice."""
    for inputs in INPUTS:
        base = make_program(0, {"inputs": inputs}, is_simple=True)
        yield base
        for axis, options in base.options.items():
            if axis != "inputs" and (inputs == "vectors" or axis in ("encoder", "interface")):
                yield from (make_program(0, {"inputs": inputs, axis: other}, is_simple=True) for other in options[1:])


def _can_iterate(name: str, inputs: str, model: Model, min_batch: int) -> bool:
    if name in ("full batch", "slices"):
        return inputs != "texts" and not model.needs_full_batches
    return name != "inner batches" or (min_batch == 1 and not model.needs_full_batches)


def _forward(choices: Choices, inputs: str, loss: Loss, model: Model, training: Training) -> list[str]:
    """Return the lines that compute ``loss``; lines that change the batch are added to the training."""
    noises = {
        "none": "",
        "normal": "xb = xb + 0.1 * torch.randn_like(xb)",
        "mixed": "xb = 0.7 * xb + 0.3 * xb[torch.randperm(len(xb))]",
        "dropped": "xb = F.dropout(xb, 0.2)",
    }
    is_float = inputs in FLOATS
    if is_float:
        training.before_forward.append(noises[choices.pick("noise", *noises, simple=0.88)])
    terms = [name for name, line in REGULARISERS.items() if model.has_output or "out" not in line]
    term = REGULARISERS[choices.pick("regulariser", *terms, simple=0.75)].format(model=model.names[0])
    lines = [model.forward, model.loss or loss.lines, model.more_loss, term]
    if not is_float or not model.has_output or training.uses_closure or not model.steps_alone:
        return lines
    # The attention of torch's transformer layers on the CPU has no second derivative.
    kinds = ("penalty", "adversarial") if "TransformerEncoderLayer" not in model.classes else ("adversarial",)
    slope = choices.pick("input gradient", "none", *kinds, simple=0.88)
    if slope == "none":
        return lines
    training.before_forward.append("xb = xb.detach().clone().requires_grad_()")
    if slope == "penalty":
        penalty = "loss = loss + 0.1 * ((slope.flatten(1).pow(2).sum(1) + 1e-4).sqrt() - 1).pow(2).mean()"
        return [*lines, "slope = torch.autograd.grad(out.sum(), xb, create_graph=True)[0]", penalty]
    training.before_forward += lines[:3]
    training.before_forward.append("slope = torch.autograd.grad(loss, xb)[0]")
    training.before_forward.append("xb = (xb + 0.2 * slope / (slope.abs().max() + 1e-3)).detach()")
    return lines


def _add_printing(choices: Choices, parts: Parts, model: Model, loss: Loss) -> None:
    kinds = ["each loss", "mean of an epoch", "weighted mean of an epoch"]
    if model.has_output and not model.loss and parts.returns == "loss, out":
        kinds.append("metric while training")
    kind = choices.pick("printing", *kinds, simple=0.3)
    counted = ["total, count = total + loss.item(), count + 1"]
    if kind == "weighted mean of an epoch":
        counted = ["total, count = total + loss.item() * len(yb), count + len(yb)"]
    elif kind == "each loss":
        counted.append("print(loss.item())")
    elif kind == "metric while training":
        parts.before_epoch.append("score = 0.0")
        counted.append(f"score += {_measure(loss)}")
        parts.after_epoch.insert(0, "print('score', score)")
    parts.after_batch = [*counted, *parts.after_batch]


def _add_evaluation(choices: Choices, parts: Parts, model: Model, loss: Loss, unpack: str) -> None:
    if not model.predict or model.loss:
        return
    kind = choices.pick("evaluation", "none", "each epoch", "at the end", "inference mode", simple=0.6)
    if kind == "none":
        return
    body = join(unpack, model.predict, f"right += {_measure(loss)}", "samples += len(yb)")
    guard = "with torch.inference_mode():" if kind == "inference mode" else "with torch.no_grad():"
    lines = join(
        *(f"{name}.eval()" for name in model.names),
        "right, samples = 0.0, 0",
        guard,
        indent("for batch in loader:\n" + indent(body)),
        "print('evaluation', right / max(1, samples))",
        *(f"{name}.train()" for name in model.names),
    )
    (parts.finish if kind == "at the end" else parts.after_epoch).append(lines)


def _measure(loss: Loss) -> str:
    """Return an expression that a metric adds up over batches."""
    return "(out - yb).abs().sum().item()" if loss.target == "values" else "(out.argmax(1) == yb).sum().item()"
