"""Values logged to a tracker of the script's own and to TensorBoard."""

import argparse
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ListTracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def tracker(self):
        return self.rows

    def store_init_configuration(self, values):
        self.rows.append(f"lr={values['lr']:.3f}")

    def log(self, values, step=None, **kwargs):
        self.rows.append(f"{step}: loss={values['loss']:.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    args = parser.parse_args()

    own = ListTracker()
    with tempfile.TemporaryDirectory() as folder:
        accelerator = Accelerator(cpu=True, log_with=["tensorboard", own], project_dir=folder)
        accelerator.init_trackers("tracked", config={"lr": 0.05})
        torch.manual_seed(0)
        inputs = torch.randn(64, 4)
        dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer, DataLoader(dataset, batch_size=args.batch_size)
        )
        for step, (batch, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": accelerator.reduce(loss.detach(), "mean").item()}, step=step)
        accelerator.end_training()
        files = list(Path(folder, "tracked").glob("events.out.tfevents.*"))
        if accelerator.is_main_process:
            print("\n".join(own.rows))
            print(f"tensorboard={len(files) > 0}")


if __name__ == "__main__":
    main()
