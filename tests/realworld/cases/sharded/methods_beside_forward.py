# Losses of methods other than `forward`, after calls that no backward pass follows, and `forward` before any call.
# outcome: equal
# compare: model, model.head.weight.grad, fitted, result
# %%
import torch
from torch import nn

torch.manual_seed(0)


class Values(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(4, 6)

    def distribution(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).view(-1, 2, 3).softmax(-1)

    def forward(self, x):
        return self.distribution(x)[..., 0]


x = torch.randn(8, 4)
model = Values()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)


def fit():
    made = Values()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for _ in range(3):
        loss = made.forward(x).square().mean() + made.head(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return made


# %% accelerate --strategy fsdp
for number in range(4):
    if number % 2:
        best = model(x).argmax(1)
    else:
        with torch.no_grad():
            best = model(x).argmax(1)
    optimizer.zero_grad()
    loss = -model.distribution(x)[torch.arange(8), best, 1].log().mean()
    loss.backward()
    optimizer.step()

# %% accelerate --strategy fsdp
fitted = fit()
with torch.no_grad():
    result = fitted(x)
