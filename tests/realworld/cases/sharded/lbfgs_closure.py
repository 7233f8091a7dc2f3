# LBFGS, which concatenates all gradients, on a sharded model.
# outcome: equal
# compare: seq, losses
# %%
import torch
import torch.nn as nn

t = torch.arange(40).view(4, 10) / 5
data = torch.sin(t)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, x, future=0):
        outputs = []
        h = torch.zeros(x.size(0), 8)
        c = torch.zeros(x.size(0), 8)
        for value in x.split(1, dim=1):
            h, c = self.lstm1(value, (h, c))
            output = self.linear(h)
            outputs += [output]
        for _ in range(future):
            h, c = self.lstm1(output, (h, c))
            output = self.linear(h)
            outputs += [output]
        return torch.cat(outputs, dim=1)


source, target = data[:, :-1], data[:, 1:]
seq = Sequence()
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.5, max_iter=4)

# %% accelerate --strategy fsdp
losses = []
for i in range(2):
    def closure():
        optimizer.zero_grad()
        out = seq(source)
        loss = criterion(out, target)
        loss.backward()
        return loss
    losses.append(optimizer.step(closure).item())
    with torch.no_grad():
        prediction = seq(source, future=3)
