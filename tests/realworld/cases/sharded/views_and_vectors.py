# Rows of sharded parameters are written through views, initialisers and vectors; norms, quantiles and penalties.
# outcome: equal
# compare: model, history
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.nn.utils import parameters_to_vector, vector_to_parameters

x, y = torch.randint(0, 7, (40, 3)), torch.randn(40, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
history = []

# %% accelerate --strategy fsdp
for xb, yb in loader:
    loss = nn.functional.mse_loss(model(xb), yb) + 1e-2 * sum(p.abs().sum() for p in model.parameters())
    optimizer.zero_grad()
    loss.backward()
    model[0].weight.data[0].fill_(0)
    model[0].weight.grad[1] = 0
    history.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
    optimizer.step()
    with torch.no_grad():
        model[2].weight.clamp_(-0.2, 0.2)
        model[2].weight.view(-1)[:3] += 0.1
        w = model[4].weight
        w /= w.norm(dim=1, keepdim=True)
        history.append(float(torch.quantile(model[2].weight, 0.3)))
        history.append(model[2].weight.std().item())
vector = parameters_to_vector(model.parameters())
vector_to_parameters(vector * 0.99 + torch.randn_like(vector) * 0.01, model.parameters())
nn.init.kaiming_uniform_(model[4].weight)
nn.init.orthogonal_(model[2].weight)
for p in model.parameters():
    p.data.add_(torch.randn_like(p) * 0.01)
    p.data += torch.randn(p.shape) * 0.01
history += [p.detach().numpy().sum() for p in model.parameters()]
history.append((model[4].weight > 0).sum().item())
history.append(sum(p.numel() for p in model.parameters()))
history.append(max(p.abs().max() for p in model.parameters()).item())
