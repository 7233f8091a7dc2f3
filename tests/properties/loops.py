"""Loops of random programs: how batches are iterated, and in which kind of code the loops stand."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.properties.data import Data
from tests.properties.encoders import indent

EPOCHS = 2
ITERATIONS = (
    "for", "enumerate", "while", "next", "zip", "generator", "full batch", "slices", "inner batches", "several passes",
)  # fmt: skip
NESTED = ("inner batches", "several passes")
"""The iterations that train more than once with a batch."""
PLACES = ("cell", "function", "function with its objects", "class", "step function")


@dataclass(frozen=True)
class Iteration:
    """The lines that iterate over batches."""

    heading: str
    """The loop's first line; empty if there is no loop over batches."""
    unpack: str
    """The lines that bind xb and the targets."""
    fetch: str = ""
    """The lines that bind ``batch``, where the heading does not."""
    setup: str = ""
    before: str = ""
    """Lines before the loop, in each epoch."""
    more_loss: str = ""
    inner: str = ""
    """The first lines of a loop over parts of a batch."""
    count: str = "len(loader)"
    """An expression of the number of batches."""


def make_iteration(name: str, data: Data, *, needs_index: bool) -> Iteration:
    """Return the lines of one of the `ITERATIONS`; the index of a batch is ``i``, where it is needed."""
    if name == "while":
        fetch = "batch = next(iterator, None)\nif batch is None:\n    break\ni += 1"
        return Iteration("while True:", data.unpack, fetch, before="iterator, i = iter(loader), -1")
    if name == "next":
        heading = "for i in range(len(loader)):"
        return Iteration(heading, data.unpack, "batch = next(iterator)", before="iterator = iter(loader)")
    if name == "zip":
        return Iteration(
            "for i, (batch, extra) in enumerate(zip(loader, extras)):",
            data.unpack,
            setup="extras = DataLoader(torch.rand(N), batch_size=BATCH)",
            more_loss="loss = loss * (0.5 + extra.mean())",
        )
    if name == "generator":
        setup = "def batches():\n    for batch in loader:\n        yield batch"
        return Iteration("for i, batch in enumerate(batches()):", data.unpack, setup=setup)
    if name == "full batch":
        return Iteration("", f"{', '.join(data.names)} = {', '.join(data.columns)}", count="1")
    if name == "slices":
        rows = ", ".join(f"{column}[start:start + BATCH]" for column in data.columns)
        heading = "for i, start in enumerate(range(0, N, BATCH)):"
        return Iteration(heading, f"{', '.join(data.names)} = {rows}", count="-(-N // BATCH)")
    if name == "inner batches":
        whole = ", ".join(f"{column}a" for column in data.columns)
        rows = ", ".join(f"{column}a[rows]" for column in data.columns)
        inner = f"{whole} = {', '.join(data.names)}\nfor rows in torch.randperm(len(yb)).split(3):"
        return Iteration(
            "for i, batch in enumerate(loader):", data.unpack, inner=f"{inner}\n    {', '.join(data.names)} = {rows}"
        )
    if name == "several passes":
        return Iteration("for i, batch in enumerate(loader):", data.unpack, inner="for _ in range(2):")
    if name == "enumerate" or needs_index:
        return Iteration("for i, batch in enumerate(loader):", data.unpack)
    return Iteration("for batch in loader:", data.unpack)


@dataclass
class Parts:
    """The lines of a program's training, by where they stand."""

    objects: list[str] = field(default_factory=list)
    """Lines that make models, optimizers and other objects."""
    state: list[str] = field(default_factory=list)
    """Lines that bind numbers and lists, which the loop changes."""
    before_epoch: list[str] = field(default_factory=list)
    update: str = ""
    """The lines that train on one batch."""
    returns: str = "loss, out"
    """What a function that trains on one batch returns."""
    after_batch: list[str] = field(default_factory=list)
    after_epoch: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    models: tuple[str, ...] = ()
    compare: tuple[str, ...] = ()
    """The names whose values are compared."""


def write_training(parts: Parts, iteration: Iteration, place: str) -> str:
    """Return the source of a program's training."""
    objects = join(*parts.objects, iteration.setup)
    state = join(*parts.state)
    finish = join(*parts.finish)
    returned = ", ".join(parts.compare)
    if place == "step function":
        step = join("def train_step(batch):", indent(join(iteration.unpack, parts.update, f"return {parts.returns}")))
        loops = _loops(parts, iteration, f"{parts.returns} = train_step(batch)")
        return join(objects, step, state, loops, finish)
    loops = _loops(parts, iteration, parts.update)
    if place == "function":
        inner = join(state, loops, finish, "return history")
        return join(objects, "def train():", indent(inner), "history = train()")
    if place == "function with its objects":
        inner = join(objects, state, loops, finish, f"return {returned}")
        return join("def train():", indent(inner), f"{returned} = train()")
    if place == "class":
        names = (*parts.models, "optimizer")
        start = join(*(f"self.{name} = {name}" for name in names))
        fit = join(*(f"{name} = self.{name}" for name in names), state, loops, finish, "return history")
        return join(
            objects,
            f"class Trainer:\n    def __init__(self, {', '.join(names)}):\n{indent(start, 2)}",
            f"    def fit(self):\n{indent(fit, 2)}",
            f"trainer = Trainer({', '.join(names)})",
            "history = trainer.fit()",
        )
    return join(objects, state, loops, finish)


def _loops(parts: Parts, iteration: Iteration, update: str) -> str:
    trained = join(update, *parts.after_batch)
    if iteration.inner:
        trained = join(iteration.inner, indent(trained))
    batch = join(iteration.fetch, iteration.unpack, trained)
    inner = join(iteration.before, iteration.heading, indent(batch)) if iteration.heading else batch
    return join(f"for epoch in range({EPOCHS}):", indent(join(*parts.before_epoch, inner, *parts.after_epoch)))


def join(*lines: str) -> str:
    """Join lines, without the empty ones."""
    return "\n".join(line for line in lines if line)
