# A cell ties two weights of the notebook's model, and gives a layer a second name.
# outcome: equal
# compare: model, history, model.decoder.weight is model.encoder.weight, model.last is model.body[0]
# %%
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(9, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.decoder = nn.Linear(6, 9, bias=False)

    def forward(self, x):
        return self.decoder(self.body(self.encoder(x)))


model = Net()
x, y = torch.randint(0, 9, (24,)), torch.randint(0, 9, (24,))
history = []

# %% accelerate
model.decoder.weight = model.encoder.weight
model.last = model.body[0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
