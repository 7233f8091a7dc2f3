# A batch sampler of one's own that puts samples of about the same length together.
# outcome: equal
# compare: model
# %%
import random
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Sampler


class LengthBatches(Sampler):
    def __init__(self, lengths, batch_size):
        self.lengths, self.batch_size = lengths, batch_size

    def __iter__(self):
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i] + random.random())
        batches = [order[i:i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        random.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return (len(self.lengths) + self.batch_size - 1) // self.batch_size


data = [torch.randn(int(n), 2) for n in torch.randint(1, 9, (35,))]


def collate(items):
    lengths = torch.tensor([len(i) for i in items])
    return {"x": pad_sequence(items, batch_first=True), "lengths": lengths, "y": torch.stack([i.sum() for i in items])}


loader = DataLoader(data, batch_sampler=LengthBatches([len(d) for d in data], 6), collate_fn=collate)


class DeepSet(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi, self.rho = nn.Sequential(nn.Linear(2, 8), nn.ReLU()), nn.Linear(8, 1)

    def forward(self, x, lengths):
        mask = (torch.arange(x.size(1)) < lengths.unsqueeze(1)).unsqueeze(-1)
        return self.rho((self.phi(x) * mask).sum(1)).squeeze(1)


model = DeepSet()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# %% accelerate
for epoch in range(2):
    for batch in loader:
        loss = nn.functional.mse_loss(model(batch["x"], batch["lengths"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
