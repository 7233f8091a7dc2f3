# Autocast and GradScaler by hand, disabled on the CPU as the recipes do it, unscale before clipping.
# outcome: equal
# compare: model, scaler.get_scale()
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

use_amp = torch.cuda.is_available()
device = "cuda" if use_amp else "cpu"
x, y = torch.randn(40, 6), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, pin_memory=use_amp)
net = model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(device, enabled=use_amp)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        with torch.autocast(device_type=device, dtype=torch.float16 if use_amp else torch.bfloat16, enabled=use_amp):
            loss = nn.functional.cross_entropy(net(xb.to(device)), yb.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
