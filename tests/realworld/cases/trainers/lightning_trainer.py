# Lightning's Trainer with a module and a loader, everything in one cell.
# outcome: told a library steps its own SGD
# compare: weight, bias, steps
# needs: lightning
# %% accelerate
import logging
import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class LitModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


torch.manual_seed(0)
x = torch.randn(32, 4)
lit = LitModel()
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(lit, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))
weight, bias, steps = lit.layer.weight.detach().clone(), lit.layer.bias.detach().clone(), trainer.global_step
