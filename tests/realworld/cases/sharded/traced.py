# A sharded model is traced in the cell in which it was trained.
# outcome: refused needs whole parameters
# compare: model, scripted_output, traced_output
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


x, y = torch.randn(24, 3), torch.randn(24, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate --strategy fsdp
for xb, yb in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(xb), yb).backward()
    optimizer.step()
model.eval()
traced = torch.jit.trace(model, x[:2])
traced.save("traced.pt")
traced_output = traced(x).detach()
scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
scripted_output = torch.jit.script(model)(x).detach()
del traced, scripted
