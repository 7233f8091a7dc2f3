# An optimizer whose state are numbers, and tensors that belong to no parameter, in cells here and there.
# outcome: equal
# compare: weights, counts
# %%
import torch


class Decaying(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.state["k"] = self.state.get("k", torch.tensor([0.0])) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] / (state["step"] + self.state["k"].item()))


torch.manual_seed(0)
model = torch.nn.Linear(3, 1).double()
optimizer = Decaying(model.parameters(), lr=0.5)
x, y = torch.randn(8, 3).double(), torch.randn(8, 1).double()

# %% accelerate
for _ in range(3):
    optimizer.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()

# %%
for _ in range(2):
    optimizer.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()
optimizer.state[model.weight]["step"] = 1

# %% accelerate
for _ in range(3):
    optimizer.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()

# %%
for _ in range(2):
    optimizer.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()
weights = [parameter.tolist() for parameter in model.parameters()]
counts = [optimizer.state["k"].item(), *(optimizer.state[parameter]["step"] for parameter in model.parameters())]
