# Characters and words of the notebook's text are numbered in cells on the workers by sorted sets; counts need no order.
# outcome: equal
# compare: index_of, num_lengths, model
# %%
import torch
import torch.nn as nn

text = "the quick brown fox jumps over the lazy dog"
index_of_character = {character: index for index, character in enumerate(sorted(set(text)))}

# %% accelerate
index_of = {word: index for index, word in enumerate(sorted(set(text.split())))}
num_lengths = len(set(len(word) for word in text.split()))
model = nn.Embedding(len(set(text)), 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.tensor([index_of_character[character] for character in text])).pow(2).mean().backward()
    optimizer.step()
