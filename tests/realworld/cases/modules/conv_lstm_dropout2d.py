# Conv lstm dropout2d.
# outcome: equal
# compare: model, losses, loss
# %%

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(64, 4, 1, 8, 8)
Y = torch.randint(0, 2, (64,))
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)
criterion = nn.CrossEntropyLoss()


class VideoNet(nn.Module):
    """frames through a convolution, as one long batch"""

    def __init__(self):
        super().__init__()
        self.c = nn.Conv2d(1, 16, 3)
        self.d = nn.Dropout2d(0.3)
        self.o = nn.Linear(16, 2)

    def forward(self, x):
        B, T = x.shape[:2]
        h = self.d(F.relu(self.c(x.flatten(0, 1)))).mean((2, 3)).view(B, T, 16).mean(1)
        return self.o(h)


model = VideoNet()
optimizer = optim.Adam(model.parameters(), lr=1e-2)

# %% accelerate
losses = []
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(epoch, round(losses[-1], 4))
