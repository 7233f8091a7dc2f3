# DINO centre of the outputs of a batch, read by worker processes.
# outcome: equal
# compare: student, teacher, center
# %%
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(128, 6)
loader = DataLoader(TensorDataset(X), batch_size=32, shuffle=True, num_workers=2)
student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.requires_grad_(False)
center = torch.zeros(8)
optimizer = optim.SGD(student.parameters(), lr=0.5)

# %% accelerate
for epoch in range(3):
    for (x,) in loader:
        with torch.no_grad():
            t = teacher(x)
        s = student(x * 0.9)
        loss = -(F.softmax((t - center) / 0.1, 1) * F.log_softmax(s / 0.2, 1)).sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            center = 0.5 * center + 0.5 * t.mean(0)
            for ps, pt in zip(student.parameters(), teacher.parameters()):
                pt.mul_(0.9).add_(ps, alpha=0.1)
print("done")
