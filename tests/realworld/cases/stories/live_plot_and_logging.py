# A logger, a timer, a figure that is redrawn with clear_output, and a table of results by hand.
# outcome: equal
# compare: model, rows
# %%
import logging
import time
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from IPython.display import clear_output, display
from torch.utils.data import DataLoader, TensorDataset

logging.basicConfig(level=logging.INFO, force=True)
logger = logging.getLogger("train")
x, y = torch.randn(32, 3), torch.randn(32, 1)
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate
rows, curve = [], []
fig, ax = plt.subplots()
for epoch in range(2):
    start = time.perf_counter()
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xb), yb)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    logger.info("epoch %d took %.2f s", epoch, time.perf_counter() - start)
    clear_output(wait=True)
    ax.plot(curve)
    display(fig)
    with torch.no_grad():
        rows.append({"epoch": epoch, "mse": nn.functional.mse_loss(model(x), y).item()})
plt.close(fig)
