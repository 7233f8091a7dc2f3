# Weights and rows of a table to which the notebook has given further names, before and between cells on workers.
# outcome: equal
# compare: model, a1, a2, a3, b1, b2, b3, b4, c1, c2, c3, base, half, d, e, e1, l0, l1, l2, l3
# %%
import torch, torch.nn as nn
torch.manual_seed(0)
X = torch.randn(64, 5)
Y = torch.randn(64, 1)
model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=16)
def run():
    for x, y in dl:
        opt.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        opt.step()
    return loss.item()
sd = model.state_dict()
w = model[0].weight.data
# %% accelerate
l0 = run()
a1 = sd['0.weight'].clone()
a2 = w.clone()
w.mul_(0.9)
a3 = model[0].weight.detach().clone()
# %%
best = model.state_dict()
row = model[2].weight.detach()[0, 2:5]
flat = [p.data for p in model.parameters()]
base = torch.arange(12.)
# %% accelerate
l1 = run()
b1 = {k: t.clone() for k, t in best.items()}
b2 = row.clone()
b3 = [f.clone() for f in flat]
b1 = [t.sum().item() for t in b1.values()]
b3 = [t.sum().item() for t in b3]
for f in flat: f.mul_(1.01)
b4 = model[0].bias.detach().clone()
base += 1
# %%
half = base[:6]
l2 = run()
c1 = best['0.weight'].clone()
c2 = row.clone()
c3 = [f.sum().item() for f in flat]
# %% accelerate
half.mul_(2)
d = base.clone()
model.load_state_dict(best)
l3 = run()
# %%
half += 1
e = base.clone()
e1 = sd['0.weight'].clone()
