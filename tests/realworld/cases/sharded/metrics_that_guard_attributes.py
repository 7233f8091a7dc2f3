# A metric that is a module without parameters, and refuses to set some of its attributes, as torchmetrics' do.
# outcome: equal
# compare: model, values, metric.total
# %%
import torch
from torch import nn


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.count = 0

    def __setattr__(self, name, value):
        if name in ("higher_is_better", "is_differentiable"):
            raise RuntimeError(f"{name} cannot be set")
        super().__setattr__(name, value)

    def forward(self, value):
        self.total = self.total + value.detach()
        self.count += 1
        return self.total / self.count


torch.manual_seed(0)
x, y = torch.randn(12, 3), torch.randn(12, 1)
model, metric, values = nn.Linear(3, 1), Mean(), []
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# %% accelerate --strategy fsdp
for _ in range(4):
    loss = nn.functional.mse_loss(model(x), y)
    values.append(metric(loss).item())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
