# A list of words of the notebook: both sides number those of a set of it, and the numberings must fit.
# outcome: told sets of the text in words have another order on the workers
# compare: num_words
# %%
import torch

words = "the quick brown fox jumps over the lazy dog".split()
word_to_index = {word: index for index, word in enumerate(set(words))}
# %% accelerate
vocabulary = set(word for word in words)
index_to_word = dict(enumerate(vocabulary))
embedding = torch.nn.Embedding(len(vocabulary), 3)
optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    embedding(torch.tensor([word_to_index[word] for word in ("the", "dog")])).sum().backward()
    optimizer.step()
num_words = len(index_to_word)
