# A character model of the courses: hidden state made by torch.zeros(1, BS, H) and carried from batch to batch.
# outcome: equal
# compare: model
# %%
import string
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

text = " ".join(word for word in (string.ascii_lowercase, string.digits, string.hexdigits, string.octdigits)) * 4
vocab = sorted(set(text))
ids = torch.tensor([vocab.index(c) for c in text])
SEQ, BS, H = 6, 8, 16
n = (len(ids) - 1) // (SEQ * BS) * SEQ * BS
xs = ids[:n].view(BS, -1, SEQ).transpose(0, 1).reshape(-1, SEQ)
ys = ids[1:n + 1].view(BS, -1, SEQ).transpose(0, 1).reshape(-1, SEQ)
loader = DataLoader(TensorDataset(xs, ys), batch_size=BS, shuffle=False, drop_last=True)


class CharModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(len(vocab), 8)
        self.rnn = nn.RNN(8, H, batch_first=True)
        self.out = nn.Linear(H, len(vocab))
        self.h = torch.zeros(1, BS, H)

    def forward(self, x):
        res, h = self.rnn(self.e(x), self.h)
        self.h = h.detach()
        return self.out(res)


model = CharModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

# %% accelerate
for epoch in range(2):
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb).flatten(0, 1), yb.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
