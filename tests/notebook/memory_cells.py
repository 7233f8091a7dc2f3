"""Cells that run out of a limited memory."""

from __future__ import annotations

MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 2048), nn.Linear(2048, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

model = nn.Sequential(*[Block() for _ in range(8)], nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
loader = DataLoader(TensorDataset(torch.randn(8192, 16), torch.zeros(8192, 1)), batch_size=8192)
"""


LIMIT = """import resource
used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 320 * 2**20, resource.RLIM_INFINITY))
"""


NO_LIMIT = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"


TRAIN = """for x, y in loader:
    loss = (model(x) - y).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
