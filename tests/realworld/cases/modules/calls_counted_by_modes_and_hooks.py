# Modes and hooks that receive all calls: a counter of operations, a mode of functions, a hook on all modules.
# outcome: equal
# compare: flops, shapes, means, gradients
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

x, y = torch.randn(34, 6), torch.randint(0, 3, (34,))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Shapes(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is F.linear:
            self.found.append(tuple(result.shape))
        return result


# %% accelerate
def step(xb, yb):
    loss = F.cross_entropy(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


flops, means, gradients, mode = [], [], [], Shapes()
for xb, yb in loader:
    step(xb, yb)
    with FlopCounterMode(display=False) as counter:
        step(xb, yb)
    flops.append(counter.get_total_flops())
    with mode, torch.device("cpu"):
        step(xb, yb)
    handle = register_module_forward_hook(lambda module, args, result: means.append(result.mean().item()))
    other = register_module_full_backward_hook(
        lambda module, incoming, outgoing: gradients.append(outgoing[0].abs().sum().item())
    )
    step(xb, yb)
    handle.remove()
    other.remove()
shapes = mode.found
del counter, handle, other, mode
