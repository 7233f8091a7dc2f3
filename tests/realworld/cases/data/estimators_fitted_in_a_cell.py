# Estimators that a cell fits are fitted under every name by which the notebook has them.
# outcome: equal
# compare: held.mean_, owner.scaler.scale_, steps, is_same, last
# needs: sklearn
# %%
import torch
import torch.nn as nn
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


class Owner:
    pass


x, y = torch.randn(24, 3) * 4 + 2, torch.randn(24, 1)
scaler, owner = StandardScaler(), Owner()
held, owner.scaler, by_name = scaler, scaler, {"scaler": scaler}
pipeline = make_pipeline(scaler, Ridge())
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
scaler.fit(x.numpy())
for _ in range(2):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(torch.from_numpy(scaler.transform(x.numpy()))), y).backward()
    optimizer.step()

# %%
is_same = by_name["scaler"] is scaler, owner.scaler is scaler, pipeline[0] is scaler
steps = pipeline.fit(x.numpy()[:12], y.numpy()[:12]).predict(x.numpy())

# %% accelerate
pipeline.fit(x.numpy()[12:], model(x)[12:].detach().numpy())

# %%
last = pipeline.predict(x.numpy()), scaler.mean_
