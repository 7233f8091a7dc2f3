# A recurrent model of one layer whose state of an uneven batch is detached in place before each call.
# outcome: equal
# compare: losses, model, total
# %%
import torch
from torch import nn

series = torch.randint(0, 2, (5, 40, 1)).double()


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x, state):
        x, state = self.rnn(x, state)
        return self.head(x), state


model = Echo()
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
criterion = nn.BCEWithLogitsLoss()
# %% accelerate
losses, state = [], None
for start in range(0, 36, 4):
    optimizer.zero_grad()
    if state is not None:
        state.detach_()
    logits, state = model(series[:, start + 1 : start + 4], state)
    loss = criterion(logits, series[:, start : start + 3])
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    total = logits.detach_().sum()
