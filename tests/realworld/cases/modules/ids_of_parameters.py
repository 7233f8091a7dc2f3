# Lists, sets and dicts of ids, made in plain cells and in marked ones, choose parameters, as in fine-tuning notebooks.
# outcome: equal
# compare: sizes, frozen, factors, head, later, loss, model
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 16)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(torch.relu(self.base(x)))


loader = DataLoader(TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,))), batch_size=16, shuffle=True)
model = Net()
ignored_params = list(map(id, model.fc.parameters()))
multipliers = {id(p): 0.1 for p in model.base.parameters()}
fc_id = id(model.fc)
sizes = []

# %% accelerate
sizes.append(len(ignored_params))

# %% accelerate
base = [p for p in model.parameters() if id(p) not in ignored_params]
optimizer = torch.optim.SGD([{"params": base}, {"params": model.fc.parameters(), "lr": 0.1}], lr=0.01, momentum=0.9)
sizes.append([len(group["params"]) for group in optimizer.param_groups])
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(multipliers.get(id(p), 1.0))
    optimizer.step()
head = [name for name, part in model.named_modules() if id(part) == fc_id]
biases = {id(p) for name, p in model.named_parameters() if name.endswith("bias")}
other = nn.Linear(6, 3)
other_ids = (id(other.weight), id(other))
multipliers[id(model.fc.bias)] = 0.5

# %%
frozen = [name for name, p in model.named_parameters() if id(p) in biases]
factors = [multipliers.get(id(p)) for p in model.parameters()]
later = [other_ids == (id(other.weight), id(other)), ignored_params == list(map(id, model.fc.parameters()))]
ignored_params.append(id(model.base.bias))

# %% accelerate
sizes.append([sum(id(p) in ids for p in model.parameters()) for ids in (ignored_params, biases, multipliers)])
later.append(other_ids == (id(other.weight), id(other)))
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x) + other(x), y)
    loss.backward()
    for p in model.parameters():
        if id(p) in biases:
            p.grad.zero_()
    optimizer.step()

# %% accelerate
sizes.append(len(ignored_params))

# %%
later.append(ignored_params == [*map(id, model.fc.parameters()), id(model.base.bias)])
