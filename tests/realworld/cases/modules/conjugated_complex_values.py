# A complex model that conjugates its output and its input, and gradients of inputs through it.
# outcome: equal
# compare: model, slopes
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))

    def forward(self, x):
        return (torch.fft.fft(x.conj()) @ self.weight).conj()


x, y = torch.randn(32, 4, dtype=torch.complex128), torch.randn(32, 3)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = Spectral()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
slopes = []

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        xb = xb.clone().requires_grad_()
        optimizer.zero_grad()
        (model(xb) - yb).abs().pow(2).mean().backward()
        optimizer.step()
        slopes.append(xb.grad.abs().sum().item())
