# An optimizer's state that code reads, changes in place, replaces, copies and clears between steps.
# outcome: equal
# needs: deepspeed
# compare: net, out, opt
# %%
import copy

import torch
import torch.nn as nn
torch.set_default_dtype(torch.float32)
x = torch.randn(12, 3)
net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
opt = torch.optim.Adam(net.parameters(), lr=0.05)
out = []
# %% accelerate --strategy deepspeed --zero-stage 3
def step():
    opt.zero_grad()
    loss = (net(x) ** 2).mean()
    loss.backward()
    opt.step()
step()
params = list(net.parameters())
out.append([opt.state[p]["exp_avg"].norm().item() for p in params])
out.append([tuple(opt.state[p]["exp_avg"].shape) == tuple(p.shape) for p in params])
opt.state[params[0]]["exp_avg"].mul_(2)
step()
opt.state[params[0]]["exp_avg"][1].zero_()
step()
opt.state[params[2]]["exp_avg_sq"] = torch.zeros_like(opt.state[params[2]]["exp_avg_sq"])
for p in params: opt.state[p]["step"].fill_(1)
step()
for p in params: opt.state[p]["step"] -= 1
saved = copy.deepcopy(opt.state[params[1]])
out.append(saved["exp_avg"])
torch.save(opt.state[params[1]]["exp_avg"], "x.pt")
out.append(torch.load("x.pt"))
s = opt.state[params[0]]
step()
out.append(s["step"].item())
out.append((s["exp_avg"] + 1).tolist())
for p in params: opt.state[p]["step"].zero_()
step()
step()
opt.state.clear()
step()
