# A module gives methods to the classes of another module, as extensions of packages do; cells call them.
# outcome: equal
# compare: model, seen, kind
# runs: always

# %%
import sys
from pathlib import Path

import torch
from torch import nn

folder = Path("package_of_a_case")
folder.mkdir(exist_ok=True)
(folder / "__init__.py").write_text("")
(folder / "base.py").write_text("""
class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer


class Quiet(Trainer):
    pass
""")
(folder / "extras.py").write_text("""
from package_of_a_case.base import Trainer


def fit(self, x, steps):
    for _ in range(steps):
        loss = (self.model(x) - 1).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
    return loss.item()


Trainer.fit = fit
Trainer.device = property(lambda self: next(self.model.parameters()).device.type)
""")
sys.path.insert(0, str(Path.cwd()))
for name in [name for name in sys.modules if name.startswith("package_of_a_case")]:
    del sys.modules[name]
from package_of_a_case.base import Quiet
import package_of_a_case.extras

torch.manual_seed(0)
x = torch.randn(16, 3)
model = nn.Linear(3, 1)
trainer = Quiet(model, torch.optim.SGD(model.parameters(), lr=0.1))

# %% accelerate
seen = [trainer.fit(x, 3)]
kind = trainer.device

# %% accelerate
seen.append(Quiet(model, trainer.optimizer).fit(x, 2))
