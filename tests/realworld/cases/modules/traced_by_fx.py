# A model of torch.fx is trained, and a trained model is traced by torch.fx in the next cell.
# outcome: equal
# compare: graph_model, model, output
# %%
import torch
import torch.fx
import torch.nn as nn

x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))

# %% accelerate
graph_model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)))
optimizer = torch.optim.SGD([*graph_model.parameters(), *model.parameters()], lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    nn.functional.cross_entropy(graph_model(x) + model(x), y).backward()
    optimizer.step()

# %% accelerate
again = torch.fx.symbolic_trace(model)
for _ in range(2):
    optimizer.zero_grad()
    nn.functional.cross_entropy(graph_model(x) + again(x), y).backward()
    optimizer.step()
output = again.eval()(x).detach()
