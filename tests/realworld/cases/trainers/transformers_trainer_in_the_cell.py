# transformers' Trainer built and run in one cell; the batch of a device is what the world leaves of the batch.
# outcome: equal
# compare: steps, weights
# needs: transformers
# %%
import os
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

# %% accelerate
def run():
    args = TrainingArguments(
        "out", per_device_train_batch_size=12 // int(os.environ.get("WORLD_SIZE", 1)), num_train_epochs=2, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, learning_rate=0.01,
    )
    model = Regression()
    trainer = Trainer(model=model, args=args, train_dataset=data)
    return trainer.train().global_step, {k: v.clone() for k, v in model.state_dict().items()}


steps, weights = run()
