"""Loops of random programs: how batches are iterated, and in which kind of code the loops stand."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.properties.data import Data
from tests.properties.encoders import indent

EPOCHS = 2
ITERATIONS = (
    "for", "enumerate", "while", "next", "zip", "generator", "full batch", "slices", "inner batches", "several passes",
    "walrus", "until it stops", "cycle", "chunks",
)  # fmt: skip
NESTED = ("inner batches", "several passes")
"""The iterations that train more than once with a batch."""
PLACES = (
    "cell", "function", "function with its objects", "class", "step function",
    "generator", "counted step", "callbacks", "context manager", "classes that extend",
)  # fmt: skip
STEPS = ("step function", "counted step", "callbacks", "classes that extend")
"""The places where a function trains on one batch."""
_COUNTED = """\
def counted(function):
    def inner(*arguments):
        inner.calls += 1
        return function(*arguments)
    inner.calls = 0
    return inner
@counted"""
_CALLBACKS = """\
class Log:
    def __init__(self):
        self.losses, self.epoch = [], 0
    def after_batch(self, loss, **more):
        self.losses.append(loss.item())
class Count:
    total = 0
    def after_batch(self, **more):
        Count.total += 1
callbacks = [Log(), Count()]
def notify(event, **values):
    for callback in callbacks:
        if (handler := getattr(callback, event, None)) is not None:
            handler(**values)"""
_CLASSES = """\
class Base:
    made = []
    def __init__(self):
        self._steps = 0
        Base.made.append(type(self).__name__)
    @property
    def steps(self):
        return self._steps
    @steps.setter
    def steps(self, value):
        self._steps = value
    def __call__(self, batch):
        self.steps += 1
        return self.step(batch)
class Logging:
    def __init__(self):
        self.seen = {}
        super().__init__()
    def __call__(self, batch):
        result = super().__call__(batch)
        self.seen[self.steps] = len(batch)
        return result"""
_PHASES = """\
phases = []
@contextlib.contextmanager
def phase(name):
    phases.append(name)
    try:
        yield len(phases)
    finally:
        phases.append(-len(phases))"""


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
    if name == "walrus":
        heading = "while (batch := next(iterator, None)) is not None:"
        return Iteration(heading, data.unpack, "i += 1", before="iterator, i = iter(loader), -1")
    if name == "until it stops":
        fetch = "try:\n    batch = next(iterator)\nexcept StopIteration:\n    break\ni += 1"
        return Iteration("while True:", data.unpack, fetch, before="iterator, i = iter(loader), -1")
    if name == "cycle":
        return Iteration(
            "for i, batch in zip(range(len(loader)), batches):", data.unpack, setup="batches = itertools.cycle(loader)"
        )
    if name == "chunks":
        fetch = "for batch in chunk:\n    i += 1"
        setup = "def in_chunks(items, size=2):\n    items = iter(items)\n"
        setup += "    while chunk := list(itertools.islice(items, size)):\n        yield chunk"
        return Iteration("for chunk in in_chunks(loader):", data.unpack, setup=setup, fetch=fetch, before="i = -1")
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
    if place in STEPS:
        body = join(iteration.unpack, parts.update, f"return {parts.returns}")
        step = join("def train_step(batch):", indent(body))
        call, end = f"{parts.returns} = train_step(batch)", ""
        if place == "counted step":
            step, end = f"{_COUNTED}\n{step}", "history.append(float(train_step.calls))"
        elif place == "callbacks":
            step, end = f"{_CALLBACKS}\n{step}", "history += [*callbacks[0].losses, float(Count.total)]"
            call += "\nnotify('after_batch', loss=loss, batch=batch)"
        elif place == "classes that extend":
            step = f"{_CLASSES}\nclass Step(Logging, Base):\n    def step(self, batch):\n{indent(body, 2)}"
            step += "\ntrain_step = Step()"
            end = "history += [float(train_step.steps), float(len(Base.made)), *map(float, train_step.seen.values())]"
        return join(objects, step, state, _loops(parts, iteration, call), finish, end)
    loops = _loops(parts, iteration, parts.update)
    if place == "generator":
        inner = join(state, _loops(parts, iteration, parts.update, "yield history[-1]"), finish, "yield len(history)")
        return join(
            objects, "def train():", indent(inner), "history = []\nfor value in train():\n    history.append(value)"
        )
    if place == "context manager":
        with_loops = join("with phase(1) as depth:", indent(loops))
        return join(_PHASES, objects, state, with_loops, finish, "history += map(float, phases)")
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


def _loops(parts: Parts, iteration: Iteration, update: str, end: str = "") -> str:
    trained = join(update, *parts.after_batch)
    if iteration.inner:
        trained = join(iteration.inner, indent(trained))
    batch = join(iteration.unpack, trained)
    if iteration.fetch.startswith("for "):
        batch = indent(batch)
    batch = join(iteration.fetch, batch)
    inner = join(iteration.before, iteration.heading, indent(batch)) if iteration.heading else batch
    return join(f"for epoch in range({EPOCHS}):", indent(join(*parts.before_epoch, inner, *parts.after_epoch, end)))


def join(*lines: str) -> str:
    """Join lines, without the empty ones."""
    return "\n".join(line for line in lines if line)
