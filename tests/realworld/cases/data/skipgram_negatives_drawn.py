# word2vec: pairs from a window, negatives drawn in the loop by torch.multinomial.
# outcome: equal
# compare: center, context
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

corpus = torch.randint(0, 20, (60,)).tolist()
pairs = [(corpus[i], corpus[i + d]) for i in range(2, 58) for d in (-2, -1, 1, 2)][:80]
loader = DataLoader(pairs, batch_size=16, shuffle=True)
center, context = nn.Embedding(20, 6), nn.Embedding(20, 6)
optimizer = torch.optim.SGD([*center.parameters(), *context.parameters()], lr=0.2)
frequencies = torch.bincount(torch.tensor(corpus), minlength=20) ** 0.75

# %% accelerate
for c, o in loader:
    negatives = torch.multinomial(frequencies, len(c) * 3, replacement=True).view(len(c), 3)
    v = center(c)
    positive = F.logsigmoid((v * context(o)).sum(1))
    negative = F.logsigmoid(-torch.bmm(context(negatives), v.unsqueeze(2)).squeeze(2)).sum(1)
    loss = -(positive + negative).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
