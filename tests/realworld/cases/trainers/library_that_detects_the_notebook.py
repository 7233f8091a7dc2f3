# A library, as fastprogress, looks when it is imported whether it is in a notebook; the cell has it from an earlier cell.
# outcome: equal
# compare: losses, shown
# %%
import importlib
import sys
from pathlib import Path

import torch
import torch.nn as nn

Path("site-packages").mkdir()
Path("site-packages/tinybar.py").write_text("""
def _is_notebook():
    try:
        return get_ipython().__class__.__name__ == "ZMQInteractiveShell"
    except NameError:
        return False


if _is_notebook():
    from IPython.display import HTML


class NotebookBar:
    def __init__(self, items):
        self.items, self.shown = items, []

    def __iter__(self):
        for item in self.items:
            yield item
            self.shown.append(HTML(f"<i>{item}</i>").data)


class ConsoleBar(NotebookBar):
    def __iter__(self):
        yield from self.items


progress_bar = NotebookBar if _is_notebook() else ConsoleBar
""")
sys.path.insert(0, "site-packages")
sys.modules.pop("tinybar", None)
importlib.invalidate_caches()
from tinybar import progress_bar

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(12, 4)

# %% accelerate
losses = []
bar = progress_bar(range(3))
for epoch in bar:
    loss = (model(x) - 1).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
shown = bar.shown
