# Encoder with padding masks, the loss of each token times a mask, divided by the number of tokens that count.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

tokens = torch.randint(1, 15, (36, 7))
lengths = torch.randint(2, 8, (36,))
tokens[torch.arange(7) >= lengths.unsqueeze(1)] = 0
loader = DataLoader(TensorDataset(tokens), batch_size=8, shuffle=True)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(15, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 15)

    def forward(self, x):
        return self.head(self.encoder(self.emb(x), src_key_padding_mask=x == 0))


model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
for epoch in range(2):
    for (x,) in loader:
        mask = (x != 0).double()
        losses = F.cross_entropy(model(x).transpose(1, 2), x, reduction="none")
        loss = (losses * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
