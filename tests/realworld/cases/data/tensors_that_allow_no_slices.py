# Batches are tensors of a class of the notebook that keeps the names of its samples and cannot be sliced without them.
# outcome: equal
# compare: model, losses
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader


class Named(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            raise ValueError("names of a part are not known")
        return super().__torch_function__(func, types, args, kwargs or {})


def collate(samples):
    images = torch.stack([image for image, _ in samples]).as_subclass(Named)
    images.names_of_samples = [name for _, name in samples]
    return images


loader = DataLoader([(torch.randn(6), f"sample {index}") for index in range(20)], batch_size=8, collate_fn=collate)
model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []

# %% accelerate
for images in loader:
    loss = model(images).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
