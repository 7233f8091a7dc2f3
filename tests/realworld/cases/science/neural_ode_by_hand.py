# A neural ODE with Euler and Runge-Kutta steps by hand over a trajectory.
# outcome: equal
# compare: func
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

A = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
starts = torch.randn(30, 2)
ends = starts @ torch.linalg.matrix_exp(A * 0.5).t()
loader = DataLoader(TensorDataset(starts, ends), batch_size=8, shuffle=True)


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 2))

    def forward(self, t, y):
        return self.net(y ** 3)


func = ODEFunc()


def odeint(f, y, steps=4, h=0.125):
    for i in range(steps):
        t = i * h
        k1 = f(t, y)
        k2 = f(t + h / 2, y + h / 2 * k1)
        k3 = f(t + h / 2, y + h / 2 * k2)
        k4 = f(t + h, y + h * k3)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return y


optimizer = torch.optim.RMSprop(func.parameters(), lr=1e-3)

# %% accelerate
for epoch in range(2):
    for y0, y1 in loader:
        optimizer.zero_grad()
        loss = torch.mean(torch.abs(odeint(func, y0) - y1))
        loss.backward()
        optimizer.step()
