# Sharded weights that a cell writes as safetensors and reads again, by functions of the package and by its file class.
# outcome: equal
# compare: model, twin, found
# %%
import numpy as np
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import torch.nn as nn
from safetensors.torch import load_file, save_file

model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
twin = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randn(40, 1))
loader = torch.utils.data.DataLoader(samples, batch_size=16)
found = []

# %% accelerate --strategy fsdp
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    save_file(model.state_dict(), "last.safetensors", {"epoch": str(epoch)})
    found.append(load_file("last.safetensors"))
    with safetensors.safe_open("last.safetensors", "pt") as file:
        found.append([file.metadata()["epoch"], file.get_tensor("0.bias")])
del file
safetensors.torch.save_model(model, "model.safetensors")
safetensors.torch.load_model(twin, "model.safetensors")
safetensors.numpy.save_file({"x": np.arange(3.0)}, "x.safetensors")
found += [safetensors.numpy.load_file("x.safetensors"), safetensors.torch.load(safetensors.torch.save({"x": x}))]

# %%
found.append(load_file("last.safetensors"))
