# An optimizer of the notebook counts its steps by numbers, and replaces the tensors of its state.
# outcome: told allow_untested_optimizer
# needs: deepspeed
# compare: model, seen, optimizer.state_dict()
# %%
import torch
from torch import nn

torch.set_default_dtype(torch.float32)


class Own(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                s["count"] = s.get("count", 0) + 1
                s["avg"] = s["avg"] * 0.9 + p.grad * 0.1 if "avg" in s else p.grad.clone()
                p.sub_(s["avg"], alpha=group["lr"] / s["count"])


inputs = torch.randn(32, 5)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = Own(model.parameters(), lr=0.1)
seen = []

# %% accelerate --strategy deepspeed --deepspeed.allow-untested-optimizer
for x, y in zip(inputs.split(8), targets.split(8)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    seen.append([optimizer.state[p]["count"] for p in model.parameters()])
    seen.append([optimizer.state[p]["avg"].abs().sum().item() for p in model.parameters()])

# %% accelerate --strategy deepspeed --deepspeed.allow-untested-optimizer
for x, y in zip(inputs.split(8), targets.split(8)):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    seen.append([optimizer.state[p]["count"] for p in model.parameters()])
assert [optimizer.state[p]["count"] for p in model.parameters()] == [8] * 4
