# A base class of the user's has a __call__ that calls forward itself and checks what it returns.
# outcome: equal
# compare: model, losses, outputs
# %%
import torch
import torch.nn as nn


class Checked(nn.Module):
    def __call__(self, *inputs, **options):
        outputs = self.forward(*inputs, **options)
        if not isinstance(outputs, (tuple, torch.Tensor)):
            raise TypeError("a layer returns tensors")
        return outputs


class Heads(Checked):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.mean, self.scale = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x, floor=0.0):
        features = self.body(x)
        return self.mean(features), nn.functional.softplus(self.scale(features)) + floor


model = Heads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
x, y = torch.randn(40, 5), torch.randn(40, 1)
losses = []

# %% accelerate --strategy fsdp
for epoch in range(3):
    for start in range(0, 40, 8):
        optimizer.zero_grad()
        mean, scale = model(x[start : start + 8], floor=0.1)
        loss = -torch.distributions.Normal(mean, scale).log_prob(y[start : start + 8]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

# %%
with torch.no_grad():
    outputs = model(x)

# %% accelerate
optimizer.zero_grad()
model(x)[0].pow(2).mean().backward()
optimizer.step()
