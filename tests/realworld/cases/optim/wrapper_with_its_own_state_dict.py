# An optimizer that wraps another one, with a state dict of its own form and groups that are those of the inner one.
# outcome: equal
# compare: net, losses, [float(v["slow"].sum()) for v in optimizer.state.values()], optimizer.param_groups[0]["counter"]
# %%
from collections import defaultdict

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class SlowWeights(torch.optim.Optimizer):
    def __init__(self, optimizer, every):
        self.optimizer, self.every = optimizer, every
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.state, self.defaults = defaultdict(dict), optimizer.defaults
        for group in self.param_groups:
            group["counter"] = 0
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def state_dict(self):
        slow = [self.state[parameter] for group in self.param_groups for parameter in group["params"]]
        return {"slow_weights": slow, "inner": self.optimizer.state_dict()}

    def load_state_dict(self, saved):
        self.optimizer.load_state_dict(saved["inner"])
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        self.state.update(zip(parameters, saved["slow_weights"], strict=True))

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] += 1
            if group["counter"] % self.every == 0:
                for parameter in group["params"]:
                    parameter.copy_(self.state[parameter]["slow"].lerp_(parameter, 0.5))
        return loss


net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = SlowWeights(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), 3)
inputs = torch.randn(50, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8, shuffle=True)
losses = []


def train():
    for x, t in loader:
        loss = (net(x) - t).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())


# %% accelerate
train()

# %%
optimizer.zero_grad()
net(inputs[:8]).mean().backward()
optimizer.step()

# %% accelerate
train()
