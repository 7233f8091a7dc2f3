"""Models of random programs, and how the cell calls them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.properties.choices import Choices
from tests.properties.encoders import Encoder, indent
from tests.properties.losses import Loss

FLOATS = ("vectors", "images", "sequences")

SIMPLE = "output"
"""The interface of a model that returns its output and nothing else."""

OF_ALL_INPUTS = (
    SIMPLE, "keyword", "tuple", "dict", "dataclass", "two outputs", "loss in the model", "loss and output in the model",
    "stored penalty", "parts", "two models", "normalised between two models", "method", "parameter in the loss",
    "weight in the cell", "teacher", "two copies of a model", "list of layers", "factory",
)  # fmt: skip
OF_FLOATS = ("centred in the cell", "called twice", "pair", "noise input", "two views", "variational", "autoencoder")
OF_INPUTS = {
    "vectors": ("gan", "input through function"),
    "sequences": ("hidden state", "carried hidden state", "time first", "output for each step"),
    "tokens": ("mask input", "next token"),
}
WITH_OWN_LOSS = {"two views", "autoencoder", "gan", "next token"}
"""Interfaces for which the choice of a loss does not apply."""


@dataclass(frozen=True)
class Model:
    """The text of a model's classes, the lines that make it, and the lines of a step that use it."""

    classes: str
    setup: str = "model = Net()"
    names: tuple[str, ...] = ("model",)
    """The names of the models that are trained."""
    forward: str = "out = model(xb)"
    loss: str | None = None
    """The lines that compute ``loss``, where they are not those of the chosen loss."""
    more_loss: str = ""
    """Lines that change ``loss`` afterwards."""
    has_output: bool = True
    """Whether ``out`` is bound to one row for each sample."""
    needs_full_batches: bool = False
    before_epoch: str = ""
    predict: str = "out = model(xb)"
    """The lines of an evaluation; empty if the model cannot be evaluated alone."""
    setup_optimizers: str = ""

    @property
    def parameters(self) -> str:
        """The expression of the parameters that the optimizer gets."""
        if len(self.names) == 1:
            return f"{self.names[0]}.parameters()"
        return "[" + ", ".join(f"*{name}.parameters()" for name in self.names) + "]"


def pick_interface(choices: Choices, inputs: str) -> str:
    """Return how the model is called."""
    more = (*(OF_FLOATS if inputs in FLOATS else ()), *OF_INPUTS.get(inputs, ()))
    return choices.pick("interface", *OF_ALL_INPUTS, *more, simple=0.4)


def make_model(interface: str, encoder: Encoder, loss: Loss, inputs: str) -> Model:
    """Return the model with this interface."""
    size = 2 if loss.target == "values" else 3
    simple = _net(encoder, f"self.head = nn.Linear(8, {size})", "x", "return self.head(self.encoder(x))")
    plain = Model(simple)
    z = "z = self.encoder(x)\n"
    head = f"self.head = nn.Linear(8, {size})"

    def returning(returned: str, more_layers: str = "") -> str:
        return _net(encoder, head + more_layers, "x", f"{z}out = self.head(z)\n{returned}")

    def of_two(forward: str) -> Model:
        setup = f"encoder, head = Encoder(), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, {size}))"
        return Model(encoder.text, setup, ("encoder", "head"), forward, predict=forward)

    own = "xb, yb, wb" if loss.uses_weights else "xb, yb"
    if interface == "keyword":
        return replace(plain, forward="out = model(x=xb)")
    if interface == "tuple":
        text = "out, features = model(xb)"
        return Model(returning("return out, z"), forward=text, predict=text)
    if interface == "dict":
        text = "out = model(xb)['logits']"
        return Model(returning("return {'logits': out, 'features': z}"), forward=text, predict=text)
    if interface == "dataclass":
        record = "@dataclasses.dataclass\nclass Output:\n    logits: torch.Tensor\n    features: torch.Tensor\n"
        text = "out = model(xb).logits"
        return Model(record + returning("return Output(out, z)"), forward=text, predict=text)
    if interface == "two outputs":
        text = "out, second = model(xb)"
        return Model(
            returning("return out, self.second(z)", "\nself.second = nn.Linear(8, 2)"),
            forward=text,
            more_loss="loss = loss + 0.3 * F.mse_loss(second, torch.ones_like(second)).sqrt()",
            predict=text,
        )
    if interface in ("loss in the model", "loss and output in the model"):
        returned = "loss" if interface == "loss in the model" else "{'loss': loss, 'logits': out}"
        return Model(
            _net(encoder, head, own, f"out = self.head(self.encoder(xb))\n{loss.lines}\nreturn {returned}"),
            forward=f"result = model({own})",
            loss="loss = result"
            if interface == "loss in the model"
            else "loss, out = result['loss'], result['logits']",
            has_output=interface != "loss in the model",
            predict="",
        )
    if interface == "stored penalty":
        return Model(
            _net(encoder, head, "x", f"{z}self.penalty = z.pow(2).mean()\nreturn self.head(z)"),
            more_loss="loss = loss + 0.1 * model.penalty",
        )
    if interface == "parts":
        text = "z = model.encoder(xb)\nout = model.head(z)"
        return replace(plain, forward=text, predict=text)
    if interface == "two models":
        return of_two("out = head(encoder(xb))")
    if interface == "normalised between two models":
        return of_two("z = encoder(xb)\nout = head(z - z.mean(0))")
    if interface == "method":
        text = simple + "\n    def predict(self, x):\n        return self.head(self.encoder(x))"
        return Model(text, forward="out = model.predict(xb)", predict="out = model.predict(xb)")
    if interface == "parameter in the loss":
        layers = head + "\nself.log_scale = nn.Parameter(torch.zeros(()))"
        return Model(
            _net(encoder, layers, "x", "return self.head(self.encoder(x))"),
            more_loss="loss = loss * torch.exp(-model.log_scale) + model.log_scale",
        )
    if interface == "weight in the cell":
        text = "out = F.linear(model.encoder(xb), model.head.weight, model.head.bias)"
        return replace(plain, forward=text, predict=text)
    if interface == "teacher":
        return replace(
            plain,
            setup="model = Net()\nteacher = Net().eval().requires_grad_(False)",
            forward="with torch.no_grad():\n    soft = teacher(xb)\nout = model(xb)",
            more_loss="loss = loss + 0.5 * F.mse_loss(out, soft)",
        )
    if interface == "two copies of a model":
        return replace(
            plain,
            setup="model = Net()\ntarget = copy.deepcopy(model)",
            forward="with torch.no_grad():\n    for a, b in zip(target.parameters(), model.parameters()):\n"
            "        a.lerp_(b, 0.1)\n    goal = target(xb)\nout = model(xb)",
            more_loss="loss = loss + 0.5 * (out - goal).pow(2).mean()",
        )
    if interface == "list of layers":
        setup = f"layers = [Encoder(), nn.Linear(8, {size})]\nmodel = nn.Sequential(*layers)"
        text = "out = xb\nfor layer in layers:\n    out = layer(out)"
        return Model(encoder.text, setup, forward=text, predict=text)
    if interface == "factory":
        text = f"{encoder.text}\ndef build():\n    return nn.Sequential(Encoder(), nn.Linear(8, {size}))"
        return Model(text, "model = build()")
    if interface == "centred in the cell":
        return replace(plain, forward="out = model(xb - xb.mean(0))")
    if interface == "called twice":
        return replace(plain, forward="out = model(xb) + 0.5 * model(0.5 * xb)")
    if interface == "pair":
        layers = f"self.head = nn.Linear(16, {size})"
        apply = "return self.head(torch.cat([self.encoder(a), self.encoder(b)], 1))"
        text = "out = model(xb, xb.flip(0))"
        return Model(_net(encoder, layers, "a, b", apply), forward=text, predict=text)
    if interface == "noise input":
        text = "out = model(xb, torch.randn(len(xb), 8))"
        apply = "return self.head(self.encoder(x) + 0.1 * noise)"
        return Model(_net(encoder, head, "x, noise", apply), forward=text, predict="")
    if interface == "two views":
        return replace(
            plain,
            forward="out = model(xb + 0.1 * torch.randn_like(xb))\nother = model(xb - 0.1 * torch.randn_like(xb))",
            loss="z = F.normalize(torch.cat([out, other]), dim=1)\n"
            "similar = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)\n"
            "loss = F.cross_entropy(similar, torch.arange(len(z)).roll(len(out)))",
        )
    if interface == "variational":
        layers = head + "\nself.mean, self.log_var = nn.Linear(8, 8), nn.Linear(8, 8)"
        apply = (
            f"{z}mean, log_var = self.mean(z), self.log_var(z)\n"
            "self.kl = 0.5 * (mean ** 2 + log_var.exp() - 1 - log_var).sum(1).mean()\n"
            "return self.head(mean + (0.5 * log_var).exp() * torch.randn_like(mean))"
        )
        return Model(_net(encoder, layers, "x", apply), more_loss="loss = loss + 0.05 * model.kl", predict="")
    if interface == "autoencoder":
        count = {"vectors": 5, "images": 50, "sequences": 12}[inputs]
        return Model(
            encoder.text,
            f"encoder, decoder = Encoder(), nn.Linear(8, {count})",
            ("encoder", "decoder"),
            "out = decoder(encoder(xb))",
            loss="loss = F.mse_loss(out, xb.flatten(1), reduction='sum') / len(xb)",
            predict="out = decoder(encoder(xb))",
        )
    if interface == "gan":
        return Model(
            encoder.text,
            "generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))\n"
            "discriminator = nn.Sequential(Encoder(), nn.Linear(8, 1))",
            ("generator", "discriminator"),
            "fake = generator(torch.randn(len(xb), 3))\nreal, faked = discriminator(xb), discriminator(fake.detach())\n"
            "d_loss = F.binary_cross_entropy_with_logits(real, torch.ones(len(xb), 1))\n"
            "d_loss = d_loss + F.binary_cross_entropy_with_logits(faked, torch.zeros(len(xb), 1))\n"
            "d_optimizer.zero_grad()\nd_loss.backward()\nd_optimizer.step()\nprint(d_loss.item())\n"
            "out = discriminator(fake)",
            loss="loss = F.binary_cross_entropy_with_logits(out, torch.ones(len(xb), 1))",
            predict="",
            setup_optimizers="d_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.05)",
        )
    if interface == "input through function":
        return replace(
            plain,
            classes=f"{simple}\ndef scale(x):\n    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1)",
            forward="out = model(scale(xb))",
            predict="out = model(scale(xb))",
        )
    if interface in ("hidden state", "carried hidden state"):
        layers = f"self.rnn = nn.GRU(3, 8, batch_first=True)\n{head}"
        text = _class("Net", layers, "x, h", "z, h = self.rnn(x, h)\nreturn self.head(z[:, -1]), h")
        if interface == "hidden state":
            call = "out, h = model(xb, torch.zeros(1, xb.size(0), 8))"
            return Model(text, forward=call, predict=call)
        return Model(
            text,
            forward="out, h = model(xb, h.detach())",
            before_epoch="h = torch.zeros(1, BATCH, 8)",
            needs_full_batches=True,
            predict="",
        )
    if interface == "time first":
        layers = f"self.rnn = nn.GRU(3, 8)\n{head}"
        text = _class("Net", layers, "x", "z, h = self.rnn(x)\nreturn self.head(z[-1])")
        return Model(text, forward="out = model(xb.transpose(0, 1))", predict="out = model(xb.transpose(0, 1))")
    if interface == "output for each step":
        layers = f"self.rnn = nn.GRU(3, 8)\n{head}"
        text = _class("Net", layers, "x", "return self.head(self.rnn(x)[0])")
        call = "steps = model(xb.transpose(0, 1))\nout = steps.mean(0)"
        return Model(text, forward=call, predict=call)
    if interface == "mask input":
        apply = "return self.head(self.encoder(x * mask))"
        call = "out = model(xb, xb != 1)"
        return Model(_net(encoder, head, "x, mask", apply), forward=call, predict=call)
    if interface == "next token":
        layers = "self.embedding = nn.Embedding(11, 8)\nself.rnn = nn.LSTM(8, 8, batch_first=True)\n"
        layers += "self.head = nn.Linear(8, 11, bias=False)\nself.head.weight = self.embedding.weight"
        text = _class("Net", layers, "x", "return self.head(self.rnn(self.embedding(x))[0])")
        return Model(
            text,
            forward="out = model(xb[:, :-1])",
            loss="loss = F.cross_entropy(out.reshape(-1, 11), xb[:, 1:].reshape(-1), ignore_index=0)",
            predict="out = model(xb)",
        )
    return plain


def _net(encoder: Encoder, layers: str, arguments: str, apply: str) -> str:
    return encoder.text + "\n" + _class("Net", f"self.encoder = Encoder()\n{layers}", arguments, apply)


def _class(name: str, layers: str, arguments: str, apply: str) -> str:
    return (
        f"class {name}(nn.Module):\n    def __init__(self):\n        super().__init__()\n{indent(layers, 2)}\n"
        f"    def forward(self, {arguments}):\n{indent(apply, 2)}"
    )
