# A recommender whose tables have sparse gradients, which share memory: users, items and their biases.
# outcome: equal
# compare: model, losses
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

users, items, ratings = torch.randint(0, 15, (90,)), torch.randint(0, 10, (90,)), torch.randn(90)
loader = DataLoader(TensorDataset(users, items, ratings), batch_size=15, shuffle=True)


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(15, 4, sparse=True), nn.Embedding(10, 4, sparse=True)
        self.user_bias, self.item_bias = nn.Embedding(15, 1, sparse=True), nn.Embedding(10, 1, sparse=True)

    def forward(self, user, item):
        product = (self.users(user) * self.items(item)).sum(1)
        return product + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)


model = Factors()
optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.01)

# %% accelerate
losses = []
for epoch in range(3):
    for user, item, rating in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(user, item), rating)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
