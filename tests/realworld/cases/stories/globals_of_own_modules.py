# A function of the user's own module sets globals of that module, and fills its lists, dicts and objects.
# outcome: equal
# compare: counting.COUNT, counting.SEEN, counting.TABLE, counting.LAST, counting.Settings.rate, counting.settings.value, SEEN is counting.SEEN, late.SEEN, late.COUNT
# %%
import sys
from pathlib import Path

import torch
from torch import nn

source = """
COUNT = 0
SEEN = []
TABLE = {"start": 1}
LAST = None


class Settings:
    rate = 0.1


settings = Settings()


def record(step):
    global COUNT, LAST
    COUNT += 1
    SEEN.append(step)
    TABLE[step] = COUNT
    LAST = {"step": step}
    Settings.rate = 0.5
    settings.value = COUNT
"""
Path("counting.py").write_text(source)
Path("late.py").write_text(source)
sys.path.insert(0, ".")
for name in ("counting", "late"):
    sys.modules.pop(name, None)
import counting
from counting import SEEN, record

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(8, 4), torch.randn(8, 2)
# %% accelerate
import late

for step in range(3):
    optimizer.zero_grad()
    ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    counting.record(step)
    late.record(step)
# %%
counting.COUNT += 10
SEEN.append("between")
record(7)
# %% accelerate
((model(x) - y) ** 2).mean().backward()
optimizer.step()
record(20)
late.record(20)
SEEN.append(counting.COUNT)
