# Style transfer in small: the picture itself is trained by an optimizer through a frozen network, no loader.
# outcome: equal
# compare: picture, losses
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

cnn = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU()).eval()
for parameter in cnn.parameters():
    parameter.requires_grad_(False)
content, style = torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)


def gram(features):
    n, c, h, w = features.shape
    flat = features.view(n * c, h * w)
    return flat @ flat.t() / (n * c * h * w)

# %% accelerate
picture = content.clone().requires_grad_(True)
optimizer = torch.optim.Adam([picture], lr=0.02)
content_target, style_target = cnn(content), gram(cnn(style))
losses = []
for step in range(15):
    optimizer.zero_grad()
    features = cnn(picture)
    loss = F.mse_loss(features, content_target) + 1e3 * F.mse_loss(gram(features), style_target)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        picture.clamp_(0, 1)
    losses.append(loss.item())
