# transformers' Trainer built in a plain cell, and asked to train in the next one.
# outcome: refused Trainer
# compare: steps
# needs: transformers
# %%
import torch
import torch.nn as nn
from transformers import Trainer, TrainingArguments


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x=None, labels=None):
        out = self.layer(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


x = torch.randn(48, 4)
data = [{"x": row, "labels": row.sum().view(1)} for row in x]
args = TrainingArguments(
    "out", per_device_train_batch_size=8, num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(model=Regression(), args=args, train_dataset=data)

# %% accelerate
steps = trainer.train().global_step
