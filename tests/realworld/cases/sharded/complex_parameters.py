# A layer with complex weights beside real ones, as Fourier neural operators have it.
# outcome: refused weight of the Spectral is complex and others are not
# compare: model
# %%
import torch
from torch import nn


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, dtype=torch.cdouble))
        self.out = nn.Linear(8, 1)

    def forward(self, x):
        frequencies = torch.zeros(len(x), 5, dtype=torch.cdouble)
        frequencies[:, :3] = torch.fft.rfft(x)[:, :3] * self.weight
        return self.out(torch.fft.irfft(frequencies, n=8))


model = Spectral()
x = torch.randn(12, 8)

# %% accelerate --strategy fsdp
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
for rows in torch.arange(12).split(4):
    loss = model(x[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
