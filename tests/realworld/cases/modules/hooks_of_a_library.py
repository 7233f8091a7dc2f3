# A library for looking into models keeps the features of a layer and the gradients of its weight, between batches.
# outcome: equal
# compare: features, calls, gradients, model
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

x, y = torch.randn(32, 5), torch.randint(0, 2, (32,))
model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
features, gradients = [], []

# %% accelerate
library = {"__name__": "looking_inside"}
exec(
    """
calls = []

def features_of(model, layer, batch):
    kept = []

    def keep(module, inputs, output):
        kept.append(output.detach().clone())
        calls.append(len(output))

    handle = layer.register_forward_hook(keep)
    model(batch)
    handle.remove()
    return kept
""",
    library,
)
handle = model[0].weight.register_hook(gradients.append)
for start in range(0, 32, 8):
    loss = F.cross_entropy(model(x[start : start + 8]), y[start : start + 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    features += library["features_of"](model, model[1], x[:6])
handle.remove()
calls = library["calls"]
