"""Losses of random programs: lines that compute ``loss`` from ``out``, the targets ``yb`` and the weights ``wb``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Target = Literal["values", "classes"]
"""``values``: yb has shape (batch, 2), as out; ``classes``: yb has shape (batch,) and out (batch, 3)."""


@dataclass(frozen=True)
class Loss:
    """Lines of a loss, and what they need."""

    target: Target
    lines: str

    @property
    def uses_weights(self) -> bool:
        """Whether the loader returns a weight for each sample."""
        return "wb" in self.lines

    @property
    def ignores_labels(self) -> bool:
        """Whether two labels are -1, which the loss ignores."""
        return "ignore_index" in self.lines

    @property
    def min_batch(self) -> int:
        """The smallest batch with a label that counts."""
        return 3 if self.ignores_labels else 1


_VALUES = {
    "mse": "loss = F.mse_loss(out, yb)",
    "l1": "loss = (out - yb).abs().mean()",
    "huber": "loss = nn.HuberLoss()(out, yb)",
    "sum": "loss = 0.1 * ((out - yb) ** 2).sum()",
    "sum over length": "loss = ((out - yb) ** 2).sum() / len(yb)",
    "root of mse": "loss = torch.sqrt(F.mse_loss(out, yb))",
    "log of mean": "loss = torch.log(1 + F.mse_loss(out, yb))",
    "square of mean": "loss = F.mse_loss(out, yb) ** 2",
    "product of means": "loss = F.mse_loss(out, yb) * (out - yb).abs().mean()",
    "norm": "loss = torch.linalg.vector_norm(out - yb)",
    "norm of each sample": "loss = (out - yb).norm(dim=1).mean()",
    "maximum": "loss = (out - yb).abs().max()",
    "logsumexp": "loss = torch.logsumexp(((out - yb) ** 2).mean(1), 0)",
    "pearson": """\
a, b = out - out.mean(0), yb - yb.mean(0)
loss = 1 - ((a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0) + 0.1)).mean()""",
    "ccc": """\
covariance = ((out - out.mean(0)) * (yb - yb.mean(0))).mean(0)
spread = out.var(0, unbiased=False) + yb.var(0, unbiased=False) + (out.mean(0) - yb.mean(0)) ** 2
loss = 1 - (2 * covariance / (spread + 0.1)).mean()""",
    "r2": "loss = ((out - yb) ** 2).sum() / (((yb - yb.mean(0)) ** 2).sum() + 0.5)",
    "median": "loss = ((out - yb) ** 2).mean(1).median()",
    "top half": """\
each = ((out - yb) ** 2).mean(1)
loss = each.topk(max(1, len(each) // 2)).values.mean()""",
    "weights": "loss = (wb * ((out - yb) ** 2).mean(1)).mean()",
    "normalized weights": "loss = (wb * ((out - yb) ** 2).mean(1)).sum() / wb.sum()",
    "masked mean": """\
mask = (yb > 0).to(out.dtype)
loss = (mask * (out - yb) ** 2).sum() / mask.sum().clamp(min=1)""",
    "selected samples": """\
chosen = yb[:, 0] > -1.5
loss = F.mse_loss(out[chosen], yb[chosen])""",
    "variance": "loss = F.mse_loss(out, yb) + 0.1 * out.var(0, unbiased=False).mean()",
    "covariance": """\
centred = out - out.mean(0)
loss = F.mse_loss(out, yb) + 0.1 * (centred.T @ centred / len(out)).pow(2).sum()""",
    "gaussian": "loss = F.gaussian_nll_loss(out[:, 0], yb[:, 0], F.softplus(out[:, 1]) + 0.1)",
    "two heads": "loss = 0.7 * F.mse_loss(out[:, 0], yb[:, 0]) + 0.3 * (out[:, 1] - yb[:, 1]).abs().mean()",
    "two heads, one masked": """\
mask = (yb[:, 1] > 0).to(out.dtype)
second = (mask * (out[:, 1] - yb[:, 1]) ** 2).sum() / mask.sum().clamp(min=1)
loss = F.mse_loss(out[:, 0], yb[:, 0]) + 0.5 * second""",
    "contrastive": """\
logits = F.normalize(out, dim=1) @ F.normalize(yb, dim=1).T / 0.5
loss = F.cross_entropy(logits, torch.arange(len(out)))""",
    "triplet": "loss = F.triplet_margin_loss(out, out.roll(1, 0), out.roll(2, 0)) + F.mse_loss(out, yb)",
    "distances": "loss = F.mse_loss(torch.cdist(out, out), torch.cdist(yb, yb))",
    "ranking": """\
wanted = (yb[:, None, 0] > yb[None, :, 0]).to(out.dtype)
loss = F.binary_cross_entropy_with_logits(out[:, None, 0] - out[None, :, 0], wanted)""",
    "quantile": "loss = ((out - yb) ** 2).mean(1).quantile(0.7)",
    "loop over samples": "loss = sum(F.mse_loss(a, b) for a, b in zip(out, yb)) / len(out)",
}

_CLASSES = {
    "cross entropy": "loss = F.cross_entropy(out, yb)",
    "cross entropy, weighted": "loss = F.cross_entropy(out, yb, weight=torch.tensor([0.2, 1.0, 3.0]))",
    "cross entropy, ignored labels": "loss = nn.CrossEntropyLoss(ignore_index=-1)(out, yb)",
    "cross entropy, smoothed": "loss = nn.CrossEntropyLoss(label_smoothing=0.1)(out, yb)",
    "cross entropy, smoothed and ignored": "loss = F.cross_entropy(out, yb, ignore_index=-1, label_smoothing=0.1)",
    "cross entropy, smoothed and weighted": """\
loss = F.cross_entropy(out, yb, weight=torch.tensor([0.2, 1.0, 3.0]), label_smoothing=0.1)""",
    "cross entropy, sum": "loss = F.cross_entropy(out, yb, reduction='sum') / 8",
    "cross entropy, sum over length": "loss = F.cross_entropy(out, yb, reduction='sum') / len(yb)",
    "nll": "loss = F.nll_loss(F.log_softmax(out, dim=1), yb)",
    "focal": """\
mean = F.cross_entropy(out, yb)
loss = (1 - torch.exp(-mean)) ** 2 * mean""",
    "focal of each sample": """\
each = F.cross_entropy(out, yb, reduction='none')
loss = ((1 - torch.exp(-each)) ** 2 * each).mean()""",
    "dice": """\
p, t = out.softmax(1), F.one_hot(yb, 3).to(out.dtype)
loss = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)""",
    "dice of each class": """\
p, t = out.softmax(1), F.one_hot(yb, 3).to(out.dtype)
loss = (1 - (2 * (p * t).sum(0) + 1) / (p.sum(0) + t.sum(0) + 1)).mean()""",
    "class weights of the batch": """\
counts = torch.bincount(yb, minlength=3).clamp(min=1)
loss = F.cross_entropy(out, yb, weight=len(yb) / counts.to(out.dtype))""",
    "mean of class means": """\
each = F.cross_entropy(out, yb, reduction='none')
loss = torch.stack([each[yb == c].mean() for c in yb.unique()]).mean()""",
    "kl": """\
soft = F.one_hot(yb, 3).to(out.dtype) * 0.8 + 0.2 / 3
loss = F.kl_div(F.log_softmax(out, dim=1), soft, reduction='batchmean')""",
    "advantages": """\
chosen = F.log_softmax(out, dim=1).gather(1, yb[:, None]).squeeze(1)
advantage = (wb - wb.mean()) / (wb.std(unbiased=False) + 0.1)
loss = -(chosen * advantage).mean()""",
    "hard examples": """\
each = F.cross_entropy(out, yb, reduction='none')
loss = each.topk(max(1, len(each) // 3)).values.mean()""",
    "weights of samples": "loss = (F.cross_entropy(out, yb, reduction='none') * wb).mean()",
    "normalized weights of samples": """\
loss = (F.cross_entropy(out, yb, reduction='none') * wb).sum() / wb.sum()""",
    "entropy of the mean": """\
mean = out.softmax(1).mean(0)
loss = F.cross_entropy(out, yb) + 0.2 * (mean * mean.log()).sum()""",
    "binary": "loss = F.binary_cross_entropy_with_logits(out, F.one_hot(yb, 3).to(out.dtype))",
    "margin": "loss = nn.MultiMarginLoss()(out, yb)",
    "supervised contrastive": """\
z = F.normalize(out, dim=1)
same = (yb[:, None] == yb[None, :]).to(out.dtype)
loss = F.mse_loss(z @ z.T, same)""",
    "prototypes": """\
centres = torch.stack([out[yb == c].mean(0) if (yb == c).any() else out.mean(0) for c in range(3)])
loss = F.cross_entropy(-torch.cdist(out, centres) ** 2, yb)""",
}

LOSSES: dict[str, Loss] = {
    **{name: Loss("values", lines) for name, lines in _VALUES.items()},
    **{name: Loss("classes", lines) for name, lines in _CLASSES.items()},
}

REGULARISERS = {
    "none": "",
    "l2": "loss = loss + 1e-2 * sum(p.pow(2).sum() for p in {model}.parameters())",
    "l1 of one weight": "loss = loss + 1e-2 * next({model}.parameters()).abs().sum()",
    "size of the output": "loss = loss + 0.05 * out.pow(2).mean()",
    "entropy": "loss = loss + 0.05 * (out.softmax(1) * out.log_softmax(1)).sum(1).mean()",
}
"""Lines that add a term to the loss."""
