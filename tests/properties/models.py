"""Models of random programs: the text of their classes, the lines that make them and those that call them."""

from __future__ import annotations

from dataclasses import dataclass

from tests.properties.encoders import Encoder, write_class
from tests.properties.losses import Loss


@dataclass(frozen=True)
class Model:
    """The text of a model's classes, the lines that make it, and the lines of a step that use it."""

    classes: str
    setup: str = "model = Net()"
    names: tuple[str, ...] = ("model",)
    """The names of the models that are trained."""
    forward: str = "out = model(xb)"
    loss: str = ""
    """The lines that compute ``loss``, where they are not those of the chosen loss."""
    more_loss: str = ""
    """Lines that change ``loss`` afterwards."""
    predict: str = ""
    """The lines of an evaluation; empty if there is none."""
    before_epoch: str = ""
    setup_optimizers: str = ""
    optimized: str = ""
    """The expression of the parameters that the optimizer gets, where they are not those of all models."""
    has_output: bool = True
    """Whether ``out`` is bound to one row for each sample."""
    needs_full_batches: bool = False
    min_batch: int = 1

    @property
    def parameters(self) -> str:
        """The expression of the parameters that the optimizer gets."""
        if self.optimized or len(self.names) == 1:
            return self.optimized or f"{self.names[0]}.parameters()"
        return "[" + ", ".join(f"*{name}.parameters()" for name in self.names) + "]"

    @property
    def steps_alone(self) -> bool:
        """Whether a step needs nothing of the step before and has one optimizer."""
        return not self.before_epoch and not self.setup_optimizers


@dataclass(frozen=True)
class Context:
    """What a model is made for."""

    encoder: Encoder
    loss: Loss
    inputs: str

    @property
    def num_outputs(self) -> int:
        """The number of columns of the output."""
        return 2 if self.loss.target == "values" else 3

    @property
    def head(self) -> str:
        """The line that makes the last layer."""
        return f"self.head = nn.Linear(8, {self.num_outputs})"

    @property
    def simple(self) -> str:
        """The classes of a model that returns its output."""
        return self.net("return self.head(self.encoder(x))")

    def net(self, apply: str, arguments: str = "x", layers: str | None = None) -> str:
        """Return the classes of a model with the encoder, a head and other layers."""
        layers = self.head if layers is None else layers
        own = write_class("Net", f"self.encoder = Encoder()\n{layers}", arguments, apply)
        return f"{self.encoder.text}\n{own}"

    def called(self, forward: str, *, more_loss: str = "") -> Model:
        """Return the simple model, called in another way."""
        return Model(self.simple, forward=forward, predict=forward, more_loss=more_loss)

    def returning(self, returned: str, forward: str, layers: str = "", *, more_loss: str = "") -> Model:
        """Return a model whose forward returns something else, of the features ``z`` and the output ``out``."""
        apply = f"z = self.encoder(x)\nout = self.head(z)\n{returned}"
        text = self.net(apply, layers=f"{self.head}\n{layers}" if layers else None)
        return Model(text, forward=forward, predict=forward, more_loss=more_loss)

    def of_two(self, forward: str) -> Model:
        """Return an encoder and a head that are two models."""
        head = f"nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, {self.num_outputs}))"
        names = ("encoder", "head")
        return Model(self.encoder.text, f"encoder, head = Encoder(), {head}", names, forward, predict=forward)
