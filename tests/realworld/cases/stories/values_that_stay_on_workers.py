# A trainer that cannot be copied stays on the workers; later cells that use it train and change what its code names
# outcome: told stayed on the workers
# compare: history, counts, len(seen), model, optimizer.param_groups[0]["lr"]
# %%
import torch
from torch import nn


class Engine:
    def __init__(self, step):
        self.step, self.handlers = step, []

    def __reduce_ex__(self, protocol):
        raise TypeError("an engine cannot be copied")

    def on(self, handler):
        self.handlers.append(handler)
        return handler

    def run(self, batches):
        for rows in batches:
            output = self.step(self, rows)
            for handler in self.handlers:
                handler(self, output)


x, y = torch.randn(24, 3), torch.randn(24, 1)
# %% accelerate
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history, counts, seen = {"loss": []}, [], set()


def update(engine, rows):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    return loss.item()


trainer = Engine(update)
# %% accelerate
@trainer.on
def record(engine, output):
    history["loss"].append(output)
    counts.append(len(counts))
    seen.add(output)
# %% accelerate
trainer.run(torch.arange(24).split(8))
assert len(history["loss"]) == 3
# %%
assert len(history["loss"]) == len(counts) == 3
history["loss"].clear()
optimizer.param_groups[0]["lr"] = 0.01
before = model.weight.detach().clone()
# %% accelerate
assert optimizer.param_groups[0]["lr"] == 0.01
trainer.run(torch.arange(24).split(8))
# %%
assert len(history["loss"]) == 3
assert len(counts) == 6
assert not torch.equal(before, model.weight)
