# A trainer's callbacks are in a collection whose class defines __setstate__ only; the notebook has names for them.
# outcome: equal
# compare: model, recorder.losses, len(callbacks.items), trainer.callbacks is callbacks, list(callbacks)[0] is recorder
# runs: always
# %%
import torch
from torch import nn

x, y = torch.randn(12, 3), torch.randn(12, 1)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Collection:
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)

    def __getattr__(self, name):  # such a class needs __setstate__, so that pickle does not ask for it here
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.items, name)

    def __setstate__(self, state):
        self.__dict__.update(state)


class Recorder:
    def begin(self):
        self.losses = []

    def end_batch(self, loss):
        self.losses.append(loss.item())


class Trainer:
    def __init__(self, callbacks):
        self.callbacks = callbacks

    def fit(self, epochs):
        for callback in self.callbacks:
            callback.begin()
        for _ in range(epochs):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for callback in self.callbacks:
                callback.end_batch(loss)


recorder = Recorder()
callbacks = Collection([recorder])
trainer = Trainer(callbacks)

# %% accelerate
trainer.fit(3)
