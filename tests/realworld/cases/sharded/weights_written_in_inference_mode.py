# In inference mode an average of the weights is updated, the best state is saved, and rows of weights are written.
# outcome: equal
# compare: model, average, norms, best['loss'], best['state'], saved
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(48, 6), torch.randint(0, 3, (48,))
loader = DataLoader(TensorDataset(x, y), batch_size=12, shuffle=True)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
average = {name: value.clone() for name, value in model.state_dict().items()}
best = {"loss": float("inf"), "state": None}


@torch.inference_mode()
def evaluate():
    model.eval()
    loss = nn.functional.cross_entropy(model(x), y)
    if loss < best["loss"]:
        best.update(loss=loss, state={name: value.clone() for name, value in model.state_dict().items()})
        torch.save(model.state_dict(), "best.pt")
    return sum(parameter.norm() ** 2 for parameter in model.parameters()).sqrt().item()


# %% accelerate --strategy fsdp
norms = []
for epoch in range(3):
    model.train()
    for batch, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
        with torch.inference_mode():
            for name, value in model.state_dict().items():
                average[name].mul_(0.9).add_(value, alpha=0.1)
    norms.append(evaluate())
with torch.inference_mode():
    for parameter in model.parameters():
        parameter.data[0] *= 0.5
        parameter[0] += 1
        parameter.add_(0.01)

# %%
saved = torch.load("best.pt")
