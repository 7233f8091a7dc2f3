# A model of an own class under stage 3: its forward computes with parameters, the cell counts them and edits gradients.
# outcome: equal
# needs: deepspeed
# compare: model, count, shapes
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6) / 3)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        return self.head(torch.tanh(x @ self.weight) * self.scale)


torch.set_default_dtype(torch.float32)
loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), batch_size=8)
model = Scaled()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# %% accelerate --strategy deepspeed --zero-stage 3
for epoch in range(2):
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(xb), yb).backward()
        model.scale.grad.mul_(0.5)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
count = sum(p.numel() for p in model.parameters() if p.requires_grad)
shapes = [tuple(p.shape) for p in model.parameters()]
