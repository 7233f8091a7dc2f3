# Submodules that the notebook has imported and that a cell uses as attributes of their package, also under another name.
# outcome: equal
# compare: model, texts, names
# %%

import importlib
import sys
import xml.dom.minidom
from pathlib import Path

import torch
import torch.nn as nn

Path("site-packages/manyparts/inner").mkdir(parents=True)
Path("site-packages/manyparts/__init__.py").write_text("NAME = 'many'\n")
Path("site-packages/manyparts/inner/__init__.py").write_text("")
Path("site-packages/manyparts/inner/deep.py").write_text("def double(x):\n    return 2 * x\n")
Path("site-packages/manyparts/other.py").write_text("def triple(x):\n    return 3 * x\n")
sys.path.insert(0, "site-packages")
for name in [name for name in sys.modules if name.partition(".")[0] == "manyparts"]:
    del sys.modules[name]
importlib.invalidate_caches()
import manyparts.inner.deep
import manyparts.other
import manyparts as parts

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 3)


def loss_of(x):
    return parts.other.triple(model(x)).pow(2).mean()


# %% accelerate
names = [manyparts.NAME]
loss = loss_of(manyparts.inner.deep.double(x))
optimizer.zero_grad()
loss.backward()
optimizer.step()
texts = [node.data for node in xml.dom.minidom.parseString("<a><!--one--></a>").firstChild.childNodes]

# %% accelerate
loss = parts.other.triple(model(x)).pow(2).mean()
optimizer.zero_grad()
loss.backward()
optimizer.step()
