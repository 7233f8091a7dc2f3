# Code that compares names by `is` instead of `==`, as it happens to work in one process.
# outcome: equal
# compare: losses, model, kinds
# %%

import warnings

import torch
import torch.nn as nn

warnings.filterwarnings("ignore", category=SyntaxWarning)
X, Y = torch.randn(32, 4), torch.randn(32, 1)
mode, layers = "train", [("linear", [4, 8]), ("relu", []), ("linear", [8, 1])]


class Learner(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers
        shapes = [shape for name, shape in layers if name is "linear"]
        self.weights = nn.ParameterList(torch.randn(out, size) for size, out in shapes)

    def forward(self, x):
        weights = iter(self.weights)
        for name, _ in self.layers:
            if name is "linear":
                x = nn.functional.linear(x, next(weights))
            elif name is "relu":
                x = torch.relu(x)
            else:
                raise NotImplementedError
        return x


model = Learner(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []

# %% accelerate
for _ in range(3):
    loss = (model(X) - Y).pow(2).mean()
    if mode is "train":
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses.append(loss.item())
kinds = [name is "linear" for name, _ in layers]
