# Padded batches of unequal lengths, packed for a GRU, lengths from the collate function.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Sequences(Dataset):
    def __init__(self):
        self.items = [torch.randint(1, 10, (int(n),)) for n in torch.randint(1, 8, (33,))]
        self.labels = [int(item.sum() % 2) for item in self.items]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i], self.labels[i]


def collate_fn(batch):
    batch = sorted(batch, key=lambda pair: len(pair[0]), reverse=True)
    seqs, labels = zip(*batch)
    lengths = torch.tensor([len(s) for s in seqs])
    return pad_sequence(seqs, batch_first=True), lengths, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 6, padding_idx=0)
        self.gru = nn.GRU(6, 8, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(16, 2)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.emb(x), lengths.cpu(), batch_first=True)
        output, hidden = self.gru(packed)
        unpacked, _ = pad_packed_sequence(output, batch_first=True)
        return self.fc(torch.cat([hidden[0], hidden[1]], dim=1) + 0 * unpacked.sum(1))


loader = DataLoader(Sequences(), batch_size=8, shuffle=True, collate_fn=collate_fn)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

# %% accelerate
for epoch in range(2):
    for x, lengths, y in loader:
        optimizer.zero_grad()
        loss = nn.CrossEntropyLoss()(model(x, lengths), y)
        loss.backward()
        optimizer.step()
