# A cell writes files and reads them in the order in which the system lists them, which is the order of training.
# outcome: equal
# compare: model, names, found, total
# runs: always
# %%
import glob, os, shutil
import torch
from torch import nn, optim

torch.manual_seed(0)
shutil.rmtree("samples", ignore_errors=True)
os.makedirs("samples/before")
for number in range(5):
    torch.save(torch.randn(4), f"samples/before/old_{number}.pt")
model = nn.Linear(4, 1)
opt = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# %% accelerate
os.makedirs("samples/new")
for number in range(12):
    torch.save(torch.randn(4), f"samples/new/{(number * 7) % 12}.pt")
    torch.save(torch.randn(4), f"samples/before/new_{number}.pt")
os.remove("samples/before/old_3.pt")
names = os.listdir("samples/new")
found = [entry.name for entry in os.scandir("samples/before")]
total = 0.0
for path in [*glob.glob("samples/new/*.pt"), *(os.path.join("samples/before", name) for name in found)]:
    batch = torch.load(path).expand(6, 4)
    loss = (model(batch) - batch.sum()).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item()
