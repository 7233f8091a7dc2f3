# Hooks registered in the notebook fill its containers while cells train on workers, and are removed again.
# outcome: equal
# compare: model, outputs, norms, counts, reports
# runs: always
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Fitting:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.report = None

    def epoch(self, loader):
        for x, y in loader:
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.report is not None:
                self.report(loss.item())


model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
loader = DataLoader(TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,))), batch_size=8)
outputs, norms, counts, reports = {}, [], [], []


def keep(name):
    def hook(module, inputs, output):
        outputs[name] = output.detach()

    return hook


handles = [
    model[0].register_forward_hook(keep("first")),
    model[2].register_full_backward_hook(lambda module, before, after: norms.append(after[0].norm().item())),
]
fitting = Fitting(model)
fitting.report = lambda loss: reports.append(loss)

# %% accelerate
fitting.epoch(loader)

# %%
counts.append((len(outputs), len(norms), len(reports)))
for handle in handles:
    handle.remove()

# %% accelerate
fitting.epoch(loader)

# %%
counts.append((len(outputs), len(norms), len(reports)))
