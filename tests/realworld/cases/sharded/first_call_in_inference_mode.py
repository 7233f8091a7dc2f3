# A model and its average are called in inference mode before anything trains, and then between the epochs, where the
# state is copied too.
# outcome: equal
# compare: model, average, before, scores, states
# runs: always
# %%
import torch
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
average = torch.optim.swa_utils.AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
states = []


@torch.inference_mode()
def evaluate(net):
    net.eval()
    states.append({name: value.clone() for name, value in net.state_dict().items()})
    return sum((net(xb).argmax(1) == yb).sum().item() for xb, yb in loader)


def train():
    model.train()
    for xb, yb in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(xb), yb).backward()
        optimizer.step()
        average.update_parameters(model)


# %% accelerate --strategy fsdp
before = evaluate(model)
scores = []
for epoch in range(2):
    train()
    scores.append((evaluate(average), evaluate(model)))
