"""Optimizers, schedules and what a step does besides the forward and the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.properties.choices import Choices
from tests.properties.encoders import indent
from tests.properties.loops import join
from tests.properties.models import Model

_OPTIMIZERS = {
    "sgd": "torch.optim.SGD({parameters}, lr=0.05)",
    "momentum": "torch.optim.SGD({parameters}, lr=0.03, momentum=0.9, nesterov=True)",
    "weight decay": "torch.optim.SGD({parameters}, lr=0.05, weight_decay=0.01)",
    "adam": "torch.optim.Adam({parameters}, lr=0.01)",
    "adamw": "torch.optim.AdamW({parameters}, lr=0.01, amsgrad=True)",
    "rmsprop": "torch.optim.RMSprop({parameters}, lr=0.01)",
    "adagrad": "torch.optim.Adagrad({parameters}, lr=0.05, eps=1e-4)",
    "lbfgs": "torch.optim.LBFGS({parameters}, lr=0.1, max_iter=2)",
    "groups": "torch.optim.SGD([{{'params': [p], 'lr': 0.02 + 0.1 * p.ndim}} for p in {parameters}], lr=0.1)",
    "filtered": "torch.optim.Adam([p for p in {parameters} if p.requires_grad], lr=0.01)",
    "nadam": "torch.optim.NAdam({parameters}, lr=0.01)",
    "radam": "torch.optim.RAdam({parameters}, lr=0.01)",
    "adamax": "torch.optim.Adamax({parameters}, lr=0.01, foreach=True)",
    "averaged sgd": "torch.optim.ASGD({parameters}, lr=0.03)",
    "adadelta": "torch.optim.Adadelta({parameters}, lr=0.5)",
    "own class": "Signed({parameters}, lr=0.02)",
}
_OWN_OPTIMIZER = """\
class Signed(torch.optim.Optimizer):
    made = 0
    def __init__(self, parameters, lr):
        super().__init__(parameters, {'lr': lr, 'decay': 0.9})
        Signed.made += 1
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group['params']:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state['moment'], state['count'] = torch.zeros_like(p), 0
                state['count'] += 1
                state['moment'].mul_(group['decay']).add_(p.grad)
                p.add_(torch.tanh(5 * state['moment']), alpha=-group['lr'] / state['count'] ** 0.5)"""

_SCHEDULES = {
    "none": ("", "", ""),
    "step of an epoch": ("torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)", "", "scheduler.step()"),
    "cosine of batches": ("torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)", "scheduler.step()", ""),
    "one cycle": (
        "torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps={steps}, cycle_momentum=False)",
        "scheduler.step()",
        "",
    ),
    "plateau": (
        "torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)",
        "",
        "scheduler.step(total)",
    ),
    "by hand": ("", "for group in optimizer.param_groups:\n    group['lr'] *= 0.95", ""),
    "cyclic": (
        "torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.03, step_size_up=2, cycle_momentum=False)",
        "scheduler.step()",
        "",
    ),
    "warm-up and then cosine": (
        "torch.optim.lr_scheduler.SequentialLR(optimizer, [torch.optim.lr_scheduler.LinearLR(optimizer, 0.3,"
        " total_iters=3), torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4)], milestones=[3])",
        "scheduler.step()",
        "",
    ),
    "chained": (
        "torch.optim.lr_scheduler.ChainedScheduler([torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 3),"
        " torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.95)])",
        "scheduler.step()",
        "",
    ),
    "own class": ("Warmup(optimizer)", "scheduler.step()", ""),
}
_OWN_SCHEDULE = """\
class Warmup(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, steps=4):
        self.steps, self.rates = steps, []
        super().__init__(optimizer)
    def get_lr(self):
        scale = min(1.0, (self.last_epoch + 1) / self.steps)
        self.rates.append(scale)
        return [rate * scale for rate in self.base_lrs]"""
_AVERAGE = """\
class Average:
    def __init__(self, model, decay=0.8):
        self.model, self.decay, self.updates, self.kept = model, decay, 0, None
        self.shadow = {name: value.detach().clone() for name, value in model.state_dict().items()}
    def update(self):
        self.updates += 1
        for name, value in self.model.state_dict().items():
            if value.is_floating_point() and name in self.shadow:
                self.shadow[name].lerp_(value, 1 - min(self.decay, self.updates / (self.updates + 2)))
    def __enter__(self):
        self.kept = copy.deepcopy(self.model.state_dict())
        self.model.load_state_dict(self.shadow, strict=False)
    def __exit__(self, *error):
        self.model.load_state_dict(self.kept)
        self.kept = None"""


@dataclass
class Training:
    """The lines around the loss, by where they stand."""

    objects: list[str] = field(default_factory=list)
    state: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Names whose values are compared besides the models'."""
    before_forward: list[str] = field(default_factory=list)
    after_loss: list[str] = field(default_factory=list)
    after_step: list[str] = field(default_factory=list)
    """Lines after each step of the optimizer."""
    after_batch: list[str] = field(default_factory=list)
    before_epoch: list[str] = field(default_factory=list)
    after_epoch: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    uses_closure: bool = False
    window: int = 1
    """How many batches are accumulated in one step."""
    steps_remainder: bool = True
    clears_after: bool = False
    clear: str = "optimizer.zero_grad()"
    step: str = "optimizer.step()"
    backward: str = "{loss}.backward()"
    scales: bool = False
    before_step: list[str] = field(default_factory=list)
    """Lines between the backward pass and the step."""

    def update(self, forward: str, num_batches: str) -> str:
        """Return the lines that train on one batch. ``num_batches`` is an expression."""
        clear = self.clear
        loss = join(forward, *self.after_loss)
        if self.uses_closure:
            body = join(clear, loss, "loss.backward()", *self.before_step, "return loss")
            step = join("loss = optimizer.step(closure)", *self.after_step)
            return join(*self.before_forward, "def closure():", indent(body), step)
        scaled = "loss" if self.window == 1 else f"(loss / {self.window})"
        backward = f"scaler.scale({scaled}).backward()" if self.scales else self.backward.format(loss=scaled)
        unscale = "scaler.unscale_(optimizer)" if self.scales and self.before_step else ""
        step = "scaler.step(optimizer)\nscaler.update()" if self.scales else self.step
        step = join(unscale, *self.before_step, step, *self.after_step)
        if self.window > 1:
            last = f" or i + 1 == {num_batches}" if self.steps_remainder else ""
            step = join(f"if (i + 1) % {self.window} == 0{last}:", indent(join(step, clear)))
            return join(*self.before_forward, loss, backward, step)
        if self.clears_after:
            return join(*self.before_forward, loss, backward, step, clear)
        return join(*self.before_forward, clear, loss, backward, step)


def make_training(choices: Choices, model: Model, *, num_steps: int, can_break: bool, can_accumulate: bool) -> Training:
    """Return the choices around the loss."""
    made = Training()
    names = [name for name in _OPTIMIZERS if model.steps_alone or name != "lbfgs"]
    optimizer = choices.pick("optimizer", *names, "by hand", simple=0.4)
    made.uses_closure = optimizer == "lbfgs"
    if optimizer == "by hand":
        moved = f"for p in {model.parameters}:\n        if p.grad is not None:\n            p -= 0.05 * p.grad"
        made.step = f"with torch.no_grad():\n    {moved}"
        made.clear = f"for p in {model.parameters}:\n    p.grad = None"
        made.objects.append("optimizer = None")
    else:
        made.objects += [_OWN_OPTIMIZER] * (optimizer == "own class")
        made.objects.append("optimizer = " + _OPTIMIZERS[optimizer].format(parameters=model.parameters))
    if not made.uses_closure:
        windows = ("none", "2", "2, remainder dropped", "3") if can_accumulate else ("none",)
        window = choices.pick("accumulation", *windows, simple=0.8)
        made.window = 1 if window == "none" else int(window[0])
        made.steps_remainder = "dropped" not in window
        made.clears_after = choices.flip("clears after the step", probability=0.2)
        made.scales = optimizer != "by hand" and choices.flip("scaler", probability=0.07)
        if made.scales:
            made.objects.append("scaler = torch.amp.GradScaler('cpu', enabled=False)")
        else:
            kinds = ["once", "two calls"] + (["gradients by hand"] if made.window == 1 else [])
            backward = choices.pick("backward", *kinds, simple=0.88)
            if backward == "two calls":
                made.backward = "(0.5 * {loss}).backward(retain_graph=True)\n(0.5 * {loss}).backward()"
            elif backward == "gradients by hand":
                made.backward = (
                    f"trained = [p for p in {model.parameters} if p.requires_grad]\n"
                    "for p, g in zip(trained, torch.autograd.grad({loss}, trained, allow_unused=True)):\n    p.grad = g"
                )
    schedules = ["none"] if optimizer == "by hand" else _SCHEDULES
    schedule = choices.pick("schedule", *schedules, simple=0.7)
    build, after_step, after_epoch = _SCHEDULES[schedule]
    if build:
        made.objects += [_OWN_SCHEDULE] * (schedule == "own class")
        made.objects.append("scheduler = " + build.format(steps=2 * num_steps + 10))
    made.after_step.append(after_step)
    made.after_epoch.append(after_epoch)
    main = model.names[0]
    _add_hooks(choices, made, main, has_output=model.has_output)
    _add_gradients(choices, made, model)
    clip = choices.pick("clip", "none", "norm", "value", simple=0.75)
    if clip == "norm":
        made.before_step.append(f"norm = torch.nn.utils.clip_grad_norm_({model.parameters}, 0.5)")
    elif clip == "value":
        made.before_step.append(f"torch.nn.utils.clip_grad_value_({model.parameters}, 0.05)")
    # `AveragedModel.update_parameters` needs as many buffers as the model had when it was copied.
    has_late_buffer = "hasattr(self, 'scale')" in model.classes
    _add_weights(choices, made, main, with_averaged=not has_late_buffer)
    _add_decisions(choices, made, can_break=can_break, has_rate=not made.uses_closure and optimizer != "by hand")
    _add_phases(choices, made, model, optimizer)
    return made


def _add_weights(choices: Choices, made: Training, main: str, *, with_averaged: bool) -> None:
    """Add copies of the weights: averages, with torch's class for them if ``with_averaged``, and the best ones."""
    kinds = ("none", "ema", "averaged model", "best", "average in a class", "average of epochs", "weights set")
    possible = [kind for kind in kinds if with_averaged or kind != "averaged model"]
    kind = choices.pick("weights", *possible, simple=0.78)
    if kind == "ema":
        made.objects.append(f"ema = copy.deepcopy({main})")
        pairs = f"for a, b in zip(ema.parameters(), {main}.parameters()):"
        made.after_step.append(f"with torch.no_grad():\n    {pairs}\n        a.lerp_(b, 0.2)")
        made.names.append("ema")
    elif kind == "averaged model":
        made.objects.append(f"averaged = torch.optim.swa_utils.AveragedModel({main})")
        made.after_step.append(f"averaged.update_parameters({main})")
        made.names.append("averaged")
    elif kind == "best":
        made.state.append("best, best_weights = float('inf'), None")
        kept = f"best, best_weights = total, copy.deepcopy({main}.state_dict())"
        made.after_epoch.append(f"if total < best:\n    {kept}")
        made.finish.append(f"{main}.load_state_dict(best_weights)")
    elif kind == "average in a class":
        made.objects += [_AVERAGE, f"average = Average({main})\nshadow = average.shadow"]
        made.after_step.append("average.update()")
        total = f"sum(p.sum().item() for p in {main}.parameters())"
        made.after_epoch.append(f"with average:\n    history.append({total})")
        made.names.append("shadow")
    elif kind == "average of epochs":
        made.state.append("states = []")
        made.after_epoch.append(f"states.append(copy.deepcopy({main}.state_dict()))")
        mean = "sum(state[name] for state in states) / len(states)"
        made.finish.append(f"{main}.load_state_dict({{name: {mean} for name in states[0]}})")
    elif kind == "weights set":
        flat = f"torch.nn.utils.parameters_to_vector({main}.parameters())"
        made.after_epoch.append(f"torch.nn.utils.vector_to_parameters(0.9 * {flat}.detach(), {main}.parameters())")


def _add_gradients(choices: Choices, made: Training, model: Model) -> None:
    """Add code that changes the gradients before a step."""
    kind = choices.pick("gradients", "as they are", "centred", "with noise", "scaled by layer", "replaced", simple=0.88)
    change = {
        "centred": "p.grad.sub_(p.grad.mean())",
        "with noise": "p.grad.add_(torch.randn_like(p.grad), alpha=0.01)",
        "scaled by layer": "p.grad.mul_(p.detach().norm() / (p.grad.norm() + 1.0))",
        "replaced": "p.grad = torch.where(p.grad.abs() > 0.01, p.grad, torch.zeros_like(p.grad))",
    }.get(kind)
    if change is not None:
        made.before_step.append(
            f"with torch.no_grad():\n    for p in {model.parameters}:\n        if p.grad is not None:\n"
            f"            {change}"
        )


def _add_decisions(choices: Choices, made: Training, *, can_break: bool, has_rate: bool) -> None:
    """Add code that depends on the value of the loss."""
    kinds = ["none", "early stop"]
    if can_break:
        kinds.append("ends the epoch")
        if not made.uses_closure:
            kinds.append("skips large losses")
    if has_rate:
        kinds.append("rate by loss")
    kind = choices.pick("decision", *kinds, simple=0.85)
    if kind == "early stop":
        made.state.append("lowest, worse = float('inf'), 0")
        made.after_epoch.append("worse = worse + 1 if total > 0.9 * lowest else 0\nlowest = min(lowest, total)")
        made.after_epoch.append("if worse >= 1:\n    break")
    elif kind == "ends the epoch":
        made.state.append("first = None")
        made.after_batch.append(
            "first = loss.item() if first is None else first\nif loss.item() < 0.8 * first:\n    break"
        )
    elif kind == "skips large losses":
        made.state.append("smallest = float('inf')")
        made.after_loss.append("if loss.item() > 1.3 * abs(smallest):\n    print('skipped')\n    continue")
        made.after_batch.append("smallest = min(smallest, loss.item())")
    elif kind == "rate by loss":
        made.before_step.append("optimizer.param_groups[0]['lr'] = 0.02 + 0.01 * math.tanh(abs(loss.item()))")


def _add_phases(choices: Choices, made: Training, model: Model, optimizer: str) -> None:
    """Add a change between the epochs."""
    kinds = ["none", "frozen in the second epoch"]
    if optimizer != "by hand" and not any("scheduler" in line for line in made.objects):
        kinds.append("a new optimizer for each epoch")
    kind = choices.pick("phases", *kinds, simple=0.9)
    if kind == "frozen in the second epoch":
        made.before_epoch.append(f"if epoch == 1:\n    next({model.names[0]}.parameters()).requires_grad_(False)")
    elif kind == "a new optimizer for each epoch":
        made.before_epoch.append("optimizer = " + _OPTIMIZERS[optimizer].format(parameters=model.parameters))


def _add_hooks(choices: Choices, made: Training, main: str, *, has_output: bool) -> None:
    kinds = ["none", "hooks on parameters", "hook on the module", "full backward hook", "gradient statistics"]
    if has_output and not made.uses_closure:
        kinds += ["hook on the output", "retained gradient"]
    kind = choices.pick("hooks", *kinds, simple=0.85)
    if kind == "none":
        return
    if kind == "hooks on parameters":
        hook = "p.register_hook(lambda g: g.clamp(-0.02, 0.02))"
        made.objects.append(f"for p in {main}.parameters():\n    if p.requires_grad:\n        {hook}")
        return
    made.objects.append("seen = []")
    made.names.append("seen")
    if kind == "hook on the module":
        hook = "lambda module, args, result: seen.append(module.training)"
        made.objects.append(f"{main}.register_forward_hook({hook})")
    elif kind == "full backward hook":
        hook = "lambda module, before, after: seen.append(after[0].abs().sum().item())"
        lines = f"if isinstance(module, nn.Linear):\n        module.register_full_backward_hook({hook})"
        made.objects.append(f"for module in {main}.modules():\n    {lines}")
    elif kind == "gradient statistics":
        squares = f"sum(p.grad.pow(2).sum().item() for p in {main}.parameters() if p.grad is not None)"
        made.before_step.append(f"seen.append({squares})")
    elif kind == "hook on the output":
        made.after_loss.append("out.register_hook(lambda gradient: seen.append(gradient.abs().sum().item()))")
    elif kind == "retained gradient":
        made.after_loss.append("out.retain_grad()")
        made.after_batch.append("seen.append(out.grad.abs().sum().item())")
