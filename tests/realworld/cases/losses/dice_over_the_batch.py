# Segmentation with a soft Dice loss over the whole batch.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


def dice_loss(logits, target, smooth=1.0):
    prob = torch.sigmoid(logits).reshape(-1)
    target = target.reshape(-1)
    intersection = (prob * target).sum()
    return 1 - (2.0 * intersection + smooth) / (prob.sum() + target.sum() + smooth)


images = torch.randn(24, 1, 6, 6)
masks = (images + 0.3 * torch.randn_like(images) > 0.5).double()
loader = DataLoader(TensorDataset(images, masks), batch_size=6, shuffle=True)
model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

# %% accelerate
for epoch in range(2):
    for image, mask in loader:
        optimizer.zero_grad()
        loss = dice_loss(model(image), mask)
        loss.backward()
        optimizer.step()
