# A long object holds a device, paths, dates and other values that names hold too; nothing changes these in place.
# outcome: equal
# compare: losses, trainer.best, str(trainer.folder), trainer.num_steps, model
# %%
import datetime
import decimal
import fractions
import pathlib
import re
import uuid

import numpy as np
import torch
import torch.nn as nn

device = torch.device("cpu")
folder = pathlib.Path("results")
began = datetime.datetime(2024, 1, 2)
limit = datetime.timedelta(hours=1)
threshold = decimal.Decimal("0.5")
share = fractions.Fraction(1, 3)
scale = np.float32(2)
epochs = range(2)
part = slice(0, 8)
pattern = re.compile("a+")
run_id = uuid.UUID(int=3)
size = torch.Size([16, 4])
X, Y = torch.randn(16, 4), torch.randn(16, 1)


class Trainer:
    def __init__(self, model, **values):
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
        self.records = [{"words": [number], "labels": [number % 2]} for number in range(120)]
        self.validation = [{"words": [number], "labels": [number % 2]} for number in range(120)]
        self.__dict__.update(values)
        self.num_steps, self.best = 0, None

    def fit(self):
        losses = []
        for _ in self.epochs:
            loss = (self.model(X.to(self.device)) - Y)[self.part].pow(2).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.num_steps += 1
            losses.append(loss.item())
            self.best = min(losses)
        return losses


model = nn.Linear(4, 1)
values = dict(device=device, folder=folder, began=began, limit=limit, threshold=threshold, share=share, scale=scale)
values.update(epochs=epochs, part=part, pattern=pattern, run_id=run_id, size=size)
trainer = Trainer(model, **values)

# %% accelerate
losses = trainer.fit()

# %% accelerate
losses += trainer.fit()
