"""How the cells of random programs call their models: what goes in, what comes out, and what else the cell uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.properties.choices import Choices
from tests.properties.encoders import write_class
from tests.properties.models import Context, Model

FLOATS = ("vectors", "images", "sequences")
_TENSORS = (*FLOATS, "tokens")
_SIMILAR = """\
similar = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
loss = F.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))"""


@dataclass(frozen=True)
class Interface:
    """A way to call a model, and the kinds of inputs that it is for."""

    make: Callable[[Context], Model]
    inputs: tuple[str, ...] = (*_TENSORS, "texts")
    has_own_loss: bool = False
    """Whether the choice of a loss does not apply."""


def _loss_inside(returned: str, lines: str, *, has_output: bool) -> Callable[[Context], Model]:
    """Return a maker of a model that computes its loss itself."""

    def make(c: Context) -> Model:
        arguments = "xb, yb, wb" if c.loss.uses_weights else "xb, yb"
        apply = f"out = self.head(self.encoder(xb))\n{c.loss.lines}\nreturn {returned}"
        text = c.net(apply, arguments)
        return Model(text, forward=f"result = model({arguments})", loss=lines, has_output=has_output)

    return make


def _dataclass(c: Context) -> Model:
    record = "@dataclasses.dataclass\nclass Output:\n    logits: torch.Tensor\n    features: torch.Tensor"
    text = c.net("z = self.encoder(x)\nreturn Output(self.head(z), z)")
    call = "out = model(xb).logits"
    return Model(f"{record}\n{text}", forward=call, predict=call)


def _named_tuple(c: Context) -> Model:
    record = "Output = collections.namedtuple('Output', 'logits features')"
    text = c.net("z = self.encoder(x)\nreturn Output(self.head(z), z)")
    call = "out = model(xb).logits"
    return Model(f"{record}\n{text}", forward=call, predict=call)


def _method(c: Context) -> Model:
    text = f"{c.simple}\n    def predict(self, x):\n        return self.head(self.encoder(x))"
    return Model(text, forward="out = model.predict(xb)", predict="out = model.predict(xb)")


def _shared_part(c: Context) -> Model:
    setup = f"body = Encoder()\none = nn.Sequential(body, nn.Linear(8, {c.num_outputs}))\n"
    setup += f"two = nn.Sequential(body, nn.Linear(8, {c.num_outputs}))"
    call = "out = one(xb) + 0.5 * two(xb)"
    return Model(
        c.encoder.text, setup, ("one", "two"), call, predict=call, optimized="[*one.parameters(), *two[1].parameters()]"
    )


def _layers(c: Context) -> Model:
    setup = f"layers = [Encoder(), nn.Linear(8, {c.num_outputs})]\nmodel = nn.Sequential(*layers)"
    call = "out = xb\nfor layer in layers:\n    out = layer(out)"
    return Model(c.encoder.text, setup, forward=call, predict=call)


def _factory(c: Context) -> Model:
    text = f"def build():\n    return nn.Sequential(Encoder(), nn.Linear(8, {c.num_outputs}))"
    return Model(f"{c.encoder.text}\n{text}", "model = build()", predict="out = model(xb)")


def _pair(c: Context) -> Model:
    apply = "return self.head(torch.cat([self.encoder(a), self.encoder(b)], 1))"
    call = "out = model(xb, xb.flip(0))"
    text = c.net(apply, "a, b", f"self.head = nn.Linear(16, {c.num_outputs})")
    return Model(text, forward=call, predict=call)


def _variational(c: Context) -> Model:
    apply = (
        "z = self.encoder(x)\nmean, log_var = self.mean(z), self.log_var(z)\n"
        "self.kl = 0.5 * (mean ** 2 + log_var.exp() - 1 - log_var).sum(1).mean()\n"
        "return self.head(mean + (0.5 * log_var).exp() * torch.randn_like(mean))"
    )
    text = c.net(apply, layers=f"{c.head}\nself.mean, self.log_var = nn.Linear(8, 8), nn.Linear(8, 8)")
    return Model(text, more_loss="loss = loss + 0.05 * model.kl")


def _autoencoder(c: Context) -> Model:
    count = {"vectors": 5, "images": 50, "sequences": 12}[c.inputs]
    return Model(
        c.encoder.text,
        f"encoder, decoder = Encoder(), nn.Linear(8, {count})",
        ("encoder", "decoder"),
        "out = decoder(encoder(xb))",
        loss="loss = F.mse_loss(out, xb.flatten(1), reduction='sum') / len(xb)",
    )


_GENERATOR = "generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5))"


def _gan(c: Context) -> Model:
    bce = "F.binary_cross_entropy_with_logits"
    return Model(
        c.encoder.text,
        f"{_GENERATOR}\ndiscriminator = nn.Sequential(Encoder(), nn.Linear(8, 1))",
        ("generator", "discriminator"),
        "fake = generator(torch.randn(len(xb), 3))\nreal, faked = discriminator(xb), discriminator(fake.detach())\n"
        f"d_loss = {bce}(real, torch.ones_like(real)) + {bce}(faked, torch.zeros_like(faked))\n"
        "d_optimizer.zero_grad()\nd_loss.backward()\nd_optimizer.step()\nprint(d_loss.item())\n"
        "out = discriminator(fake)",
        loss=f"loss = {bce}(out, torch.ones(len(xb), 1))",
        setup_optimizers="d_optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.05)",
        optimized="generator.parameters()",
    )


def _critic(c: Context) -> Model:
    return Model(
        c.encoder.text,
        f"{_GENERATOR}\ncritic = nn.Sequential(Encoder(), nn.Linear(8, 1))",
        ("generator", "critic"),
        "for _ in range(2):\n    with torch.no_grad():\n        fake = generator(torch.randn(len(xb), 3))\n"
        "    mixing = torch.rand(len(xb), 1)\n"
        "    between = (mixing * xb.detach() + (1 - mixing) * fake).requires_grad_()\n"
        "    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]\n"
        "    penalty = ((slope.pow(2).sum(1) + 1e-4).sqrt() - 1).pow(2).mean()\n"
        "    c_loss = critic(fake).mean() - critic(xb).mean() + 10 * penalty\n"
        "    c_optimizer.zero_grad()\n    c_loss.backward()\n    c_optimizer.step()\n"
        "out = critic(generator(torch.randn(len(xb), 3)))",
        loss="loss = -out.mean()",
        setup_optimizers="c_optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.01)",
        optimized="generator.parameters()",
    )


def _hidden_state(c: Context) -> Model:
    call = "out, h = model(xb, torch.zeros(1, xb.size(0), 8))"
    return Model(_with_hidden(c), forward=call, predict=call)


def _carried_hidden_state(c: Context) -> Model:
    return Model(
        _with_hidden(c),
        forward="out, h = model(xb, h.detach())",
        before_epoch="h = torch.zeros(1, BATCH, 8)",
        needs_full_batches=True,
    )


def _with_hidden(c: Context) -> str:
    layers = f"self.rnn = nn.GRU(3, 8, batch_first=True)\n{c.head}"
    return write_class("Net", layers, "x, h", "z, h = self.rnn(x, h)\nreturn self.head(z[:, -1]), h")


def _time_first(returned: str, call: str) -> Callable[[Context], Model]:
    def make(c: Context) -> Model:
        text = write_class("Net", f"self.rnn = nn.GRU(3, 8)\n{c.head}", "x", f"z, h = self.rnn(x)\nreturn {returned}")
        return Model(text, forward=call, predict=call)

    return make


def _stepwise(c: Context) -> Model:
    text = write_class("Net", f"self.cell = nn.GRUCell(3, 8)\n{c.head}", "x, h", "return self.cell(x, h)")
    call = "h = torch.zeros(len(xb), 8)\nfor t in range(xb.size(1)):\n    h = model(xb[:, t], h)\nout = model.head(h)"
    return Model(text, forward=call, predict=call)


def _seq2seq(c: Context) -> Model:
    coder = write_class("Coder", "self.rnn = nn.GRU(3, 8, batch_first=True)", "x", "return self.rnn(x)[1]")
    layers = f"self.rnn = nn.GRU(3, 8, batch_first=True)\n{c.head}"
    decoder = write_class("Decoder", layers, "x, h", "return self.head(self.rnn(x, h)[0]).mean(1)")
    call = "state = encoder(xb)\nout = decoder(xb.flip(1), state)"
    setup = "encoder, decoder = Coder(), Decoder()"
    return Model(f"{coder}\n{decoder}", setup, ("encoder", "decoder"), call, predict=call)


def _next_token(c: Context) -> Model:
    layers = "self.embedding = nn.Embedding(11, 8)\nself.rnn = nn.LSTM(8, 8, batch_first=True)\n"
    layers += "self.head = nn.Linear(8, 11, bias=False)\nself.head.weight = self.embedding.weight"
    text = write_class("Net", layers, "x", "return self.head(self.rnn(self.embedding(x))[0])")
    loss = "loss = F.cross_entropy(out.reshape(-1, 11), xb[:, 1:].reshape(-1), ignore_index=0)"
    return Model(text, forward="out = model(xb[:, :-1])", loss=loss)


def _input_through_function(c: Context) -> Model:
    scale = "def scale(x):\n    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 0.1)"
    return Model(f"{c.simple}\n{scale}", forward="out = model(scale(xb))", predict="out = model(scale(xb))")


def _bank(c: Context) -> Model:
    apply = "z, keys = self.encoder(x), self.encoder(bank)\nreturn self.head(z + (z @ keys.T).softmax(1) @ keys)"
    call = "out = model(xb, bank)"
    setup = "bank = torch.randn(BATCH, 5)\nmodel = Net()"
    return Model(c.net(apply, "x, bank"), setup, forward=call, predict=call)


def _differential_equation(c: Context) -> Model:
    term = (
        "points = torch.rand(6, 5, requires_grad=True)\nu = model(points)\n"
        "slope = torch.autograd.grad(u.sum(), points, create_graph=True)[0]\n"
        "loss = loss + 0.1 * (slope.sum(1) - u[:, 0]).pow(2).mean()"
    )
    return Model(c.simple, more_loss=term, predict="out = model(xb)")


def _two_copies(c: Context) -> Model:
    follow = "for a, b in zip(target.parameters(), model.parameters()):"
    return Model(
        c.simple,
        "model = Net()\ntarget = copy.deepcopy(model)",
        forward=f"with torch.no_grad():\n    {follow}\n        a.lerp_(b, 0.1)\n    goal = target(xb)\nout = model(xb)",
        more_loss="loss = loss + 0.5 * (out - goal).pow(2).mean()",
        predict="out = model(xb)",
    )


_Z = "z = self.encoder(x)\n"
_REPEATED = "out = model(xb.repeat_interleave(3, 0)).view(len(xb), 3, -1).mean(1)"
_VIEWS = "out, view = model(xb + 0.1 * torch.randn_like(xb)), model(xb - 0.1 * torch.randn_like(xb))"
_JOINED = "out, view = model(torch.cat([xb + 0.1 * torch.randn_like(xb), xb])).chunk(2)"
_CALLED_IN_TIME_ORDER = "steps = model(xb.transpose(0, 1))\nout = steps.mean(0)"

INTERFACES: dict[str, Interface] = {
    "output": Interface(lambda c: c.called("out = model(xb)")),
    "keyword": Interface(lambda c: c.called("out = model(x=xb)")),
    "tuple": Interface(lambda c: c.returning("return out, z", "out, features = model(xb)")),
    "list output": Interface(lambda c: c.returning("return [out, z]", "out = model(xb)[0]")),
    "dict": Interface(lambda c: c.returning("return {'logits': out, 'features': z}", "out = model(xb)['logits']")),
    "dataclass": Interface(_dataclass),
    "named tuple": Interface(_named_tuple),
    "dict input": Interface(
        lambda c: Model(
            c.net("return self.head(self.encoder(batch['x']))", "batch"),
            forward="out = model({'x': xb})",
            predict="out = model({'x': xb})",
        )
    ),
    "two outputs": Interface(
        lambda c: c.returning(
            "return out, self.second(z)",
            "out, second = model(xb)",
            "self.second = nn.Linear(8, 2)",
            more_loss="loss = loss + 0.3 * F.mse_loss(second, torch.ones_like(second)).sqrt()",
        )
    ),
    "mean as an output": Interface(
        lambda c: c.returning(
            "return out, z.pow(2).mean()", "out, penalty = model(xb)", more_loss="loss = loss + 0.3 * penalty"
        )
    ),
    "parameter as an output": Interface(
        lambda c: c.returning(
            "return out, self.scale",
            "out, scale = model(xb)",
            "self.scale = nn.Parameter(torch.ones(3))",
            more_loss="loss = loss * scale.pow(2).mean() + (scale - 2).pow(2).sum()",
        )
    ),
    "loss in the model": Interface(_loss_inside("loss", "loss = result", has_output=False)),
    "loss and output in the model": Interface(
        _loss_inside("{'loss': loss, 'logits': out}", "loss, out = result['loss'], result['logits']", has_output=True)
    ),
    "stored penalty": Interface(
        lambda c: Model(
            c.net(f"{_Z}self.penalty = z.pow(2).mean()\nreturn self.head(z)"),
            more_loss="loss = loss + 0.1 * model.penalty",
            predict="out = model(xb)",
        )
    ),
    "stored features": Interface(
        lambda c: Model(
            c.net(f"{_Z}self.features = z\nreturn self.head(z)"),
            more_loss="loss = loss + 0.1 * model.features.std(0, unbiased=False).mean()",
            predict="out = model(xb)",
        )
    ),
    "parts": Interface(lambda c: c.called("z = model.encoder(xb)\nout = model.head(z)")),
    "part and whole": Interface(
        lambda c: c.called("z = model.encoder(xb)\nout = model(xb)", more_loss="loss = loss + 0.1 * z.mean(0).norm()")
    ),
    "two models": Interface(lambda c: c.of_two("out = head(encoder(xb))")),
    "normalized between two models": Interface(lambda c: c.of_two("z = encoder(xb)\nout = head(z - z.mean(0))")),
    "shared part": Interface(_shared_part),
    "method": Interface(_method),
    "functional call": Interface(
        lambda c: c.called("out = torch.func.functional_call(model, dict(model.named_parameters()), (xb,))")
    ),
    "parameter in the loss": Interface(
        lambda c: Model(
            c.net("return self.head(self.encoder(x))", layers=f"{c.head}\nself.scale = nn.Parameter(torch.zeros(()))"),
            more_loss="loss = loss * torch.exp(-model.scale) + model.scale",
            predict="out = model(xb)",
        )
    ),
    "weight in the cell": Interface(
        lambda c: c.called("out = F.linear(model.encoder(xb), model.head.weight, model.head.bias)")
    ),
    "teacher": Interface(
        lambda c: Model(
            c.simple,
            "model = Net()\nteacher = Net().eval().requires_grad_(False)",
            forward="with torch.no_grad():\n    soft = teacher(xb)\nout = model(xb)",
            more_loss="loss = loss + 0.5 * F.mse_loss(out, soft)",
            predict="out = model(xb)",
        )
    ),
    "two copies of a model": Interface(_two_copies),
    "list of layers": Interface(_layers),
    "factory": Interface(_factory),
    "one row more": Interface(lambda c: c.called("out = model(xb) - 0.5 * model(xb[:1])"), _TENSORS),
    "repeated rows": Interface(lambda c: c.called(_REPEATED), _TENSORS),
    "reordered rows": Interface(
        lambda c: c.called("order = torch.randperm(len(xb))\nout = model(xb[order])[order.argsort()]"), _TENSORS
    ),
    "two halves": Interface(
        lambda c: Model(
            c.simple, forward="out = torch.cat([model(xb[:1]), model(xb[1:])])", predict="out = model(xb)", min_batch=2
        ),
        _TENSORS,
    ),
    "number as an input": Interface(
        lambda c: Model(
            c.net("return self.head(self.encoder(x) * scale)", "x, scale"),
            forward="out = model(xb, 0.5)",
            predict="out = model(xb, 0.5)",
        )
    ),
    "mask input": Interface(
        lambda c: Model(
            c.net("return self.head(self.encoder(x * mask))", "x, mask"),
            forward="out = model(xb, xb != 1)",
            predict="out = model(xb, xb != 1)",
        ),
        _TENSORS,
    ),
    "similarities": Interface(
        lambda c: Model(
            c.net(f"{_Z}z = self.head(z)\nreturn z @ z.T"),
            loss="loss = F.cross_entropy(out, torch.arange(len(xb)).roll(1))",
        ),
        has_own_loss=True,
    ),
    "graph": Interface(
        lambda c: Model(
            c.net("return self.head(edges @ self.encoder(x))", "x, edges"),
            forward="edges = (torch.cdist(xb.flatten(1), xb.flatten(1)) < 3.5).to(xb.dtype) / len(xb)\n"
            "out = model(xb, edges)",
        ),
        FLOATS,
    ),
    "centred in the cell": Interface(lambda c: c.called("out = model(xb - xb.mean(0))"), FLOATS),
    "called twice": Interface(lambda c: c.called("out = model(xb) + 0.5 * model(0.5 * xb)"), FLOATS),
    "pair": Interface(_pair, _TENSORS),
    "noise input": Interface(
        lambda c: Model(
            c.net("return self.head(self.encoder(x) + 0.1 * noise)", "x, noise"),
            forward="out = model(xb, torch.randn(len(xb), 8))",
        )
    ),
    "two views": Interface(
        lambda c: Model(
            c.simple,
            forward=_VIEWS,
            loss=f"z = F.normalize(torch.cat([out, view]), dim=1)\n{_SIMILAR}",
        ),
        FLOATS,
        has_own_loss=True,
    ),
    "two views in one call": Interface(
        lambda c: Model(
            c.simple,
            forward=_JOINED,
            loss=f"z = F.normalize(torch.cat([out, view]), dim=1)\n{_SIMILAR}",
        ),
        FLOATS,
        has_own_loss=True,
    ),
    "variational": Interface(_variational),
    "autoencoder": Interface(_autoencoder, FLOATS, has_own_loss=True),
    "gan": Interface(_gan, ("vectors",), has_own_loss=True),
    "critic": Interface(_critic, ("vectors",), has_own_loss=True),
    "bank": Interface(_bank, ("vectors",)),
    "differential equation": Interface(_differential_equation, ("vectors",)),
    "input through a function": Interface(_input_through_function, FLOATS),
    "hidden state": Interface(_hidden_state, ("sequences",)),
    "carried hidden state": Interface(_carried_hidden_state, ("sequences",)),
    "time first": Interface(_time_first("self.head(z[-1])", "out = model(xb.transpose(0, 1))"), ("sequences",)),
    "output for each step": Interface(_time_first("self.head(z)", _CALLED_IN_TIME_ORDER), ("sequences",)),
    "stepwise": Interface(_stepwise, ("sequences",)),
    "sequence to sequence": Interface(_seq2seq, ("sequences",)),
    "next token": Interface(_next_token, ("tokens",), has_own_loss=True),
}


def pick_interface(choices: Choices, inputs: str) -> str:
    """Return how the model is called."""
    names = [name for name, interface in INTERFACES.items() if inputs in interface.inputs]
    return choices.pick("interface", *names, simple=0.4)
