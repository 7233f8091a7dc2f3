# A vocabulary that is a set: the notebook numbers its words, and so does a cell on the workers.
# outcome: told the set words has another order on the workers
# compare: number
# %%
import torch

words = set("the quick brown fox jumps over the lazy dog".split())
word_to_index = {word: index for index, word in enumerate(words)}
# %% accelerate
index_to_word = {index: word for index, word in enumerate(words)}
embedding = torch.nn.Embedding(len(words), 3)
optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    embedding(torch.tensor([word_to_index[word] for word in ("the", "dog")])).sum().backward()
    optimizer.step()
number = len(index_to_word)
