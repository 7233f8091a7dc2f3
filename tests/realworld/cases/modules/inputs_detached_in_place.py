# A model whose code fails for a view of the batch, though not for the batch: it detaches its input in place.
# outcome: equal
# compare: losses, model, printed
# %%
import torch
from torch import nn

x, y = torch.randn(6, 3), torch.randn(6, 2)


class Detaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x.detach_())


model = Detaching()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
# %% accelerate
losses = []
for _ in range(3):
    loss = (model(x) - y).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
printed = [round(value, 6) for value in losses]
