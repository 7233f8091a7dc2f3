# Language modelling: logits flattened, padding ignored by ignore_index.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

PAD = 0
sequences = [torch.randint(1, 12, (int(torch.randint(2, 9, (1,))),)) for _ in range(30)]


def collate(batch):
    padded = pad_sequence(batch, batch_first=True, padding_value=PAD)
    return padded[:, :-1], padded[:, 1:]


loader = DataLoader(sequences, batch_size=7, shuffle=True, collate_fn=collate)
model = nn.Sequential(nn.Embedding(12, 8, padding_idx=PAD), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

# %% accelerate
for epoch in range(2):
    for inputs, targets in loader:
        logits = model(inputs)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
