# The hashing trick: a dataset counts words in buckets by hash(), on the workers and in the notebook.
# outcome: told this cell calls hash(...): of text it is another number on the workers
# compare: len(texts)
# %%
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

texts = [("good film fun", 1), ("bad boring film", 0), ("great fun", 1), ("awful plot bad", 0)] * 4


def count_words(text):
    counts = torch.zeros(64)
    for word in text.split():
        counts[hash(word) % 64] += 1
    return counts


class Reviews(Dataset):
    def __len__(self):
        return len(texts)

    def __getitem__(self, index):
        return count_words(texts[index][0]), texts[index][1]


model = nn.Linear(64, 2)

# %% accelerate
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for x, y in DataLoader(Reviews(), 4):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# %%
scores = model(count_words("good fun"))
