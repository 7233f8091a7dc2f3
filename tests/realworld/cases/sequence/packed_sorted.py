# Packed sorted.
# outcome: equal
# compare: model, losses
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

X = torch.randn(64, 9, 4)
L = torch.tensor([9] * 8 + [7] * 4 + [5] * 4).repeat(4)
Y = torch.randint(0, 2, (64, 9))
batches = [(X[i : i + 16], L[i : i + 16], Y[i : i + 16]) for i in range(0, 64, 16)]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Linear(4, 8)
        self.fc = nn.Linear(8, 2)

    def forward(self, x, lengths):
        p = pack_padded_sequence(x, lengths, batch_first=True)
        h, _ = pad_packed_sequence(p._replace(data=torch.tanh(self.w(p.data))), batch_first=True)
        return self.fc(h)


model = Tagger()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
losses = []

# %% accelerate
for epoch in range(2):
    for x, l, y in batches:
        out = model(x, l)
        loss = F.cross_entropy(out.flatten(0, 1), y[:, : out.size(1)].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, losses[-1])
