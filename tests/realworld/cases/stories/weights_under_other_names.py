# Weights that a cell binds to further names, as sd = model.state_dict(): they stay the model's, in later cells too.
# outcome: equal
# compare: model, a1, a2, a3, a4, a5, a6, b1, b2, b3, b4, b5, c1, c2, c3, c4, c5, same, l, l1, l2, l3
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
# %% accelerate
l = run()
sd = model.state_dict()
w = model[0].weight.data
v = model[0].weight[0]
row = model[2].weight.detach()[0, 2:5]
params = list(model.parameters())
npw = model[2].bias.detach().numpy()
# %%
l1 = run()
a1 = sd['0.weight'].clone()
a2 = w.clone()
a3 = row.clone()
a4 = npw.copy()
same = float(params[0] is model[0].weight)
sd['2.bias'].zero_()
a5 = model[2].bias.detach().clone()
with torch.no_grad(): w.mul_(0.5)
a6 = model[0].weight.detach().clone()
# %% accelerate
l2 = run()
b1 = sd['0.weight'].clone()
b2 = w.clone()
b3 = row.clone()
b4 = npw.copy()
row.add_(1.0)
b5 = model[2].weight.detach().clone()
# %%
l3 = run()
c1 = sd['0.weight'].clone()
c2 = w.clone()
c3 = row.clone()
c4 = npw.copy()
c5 = sum(p.sum().item() for p in params)
