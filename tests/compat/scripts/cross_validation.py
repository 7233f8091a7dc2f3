"""Train one model for each fold, and average what they predict on a test set."""

import argparse

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()

    accelerator = Accelerator()
    digits = load_digits()
    inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train, test = TensorDataset(inputs[:900], targets[:900]), TensorDataset(inputs[900:1201], targets[900:1201])

    folds = []
    for indices, _ in StratifiedKFold(n_splits=3).split(np.zeros(900), digits.target[:900]):
        set_seed(0)
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        train_loader = DataLoader(Subset(train, indices.tolist()), batch_size=args.batch_size)
        test_loader = DataLoader(test, batch_size=args.batch_size)
        model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
        for _ in range(2):
            model.train()
            for features, labels in train_loader:
                accelerator.backward(nn.functional.cross_entropy(model(features), labels))
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        logits = []
        with torch.no_grad():
            for features, _ in test_loader:
                logits.append(accelerator.gather_for_metrics(model(features)))
        folds.append(torch.cat(logits))
        model, optimizer, train_loader, test_loader = accelerator.free_memory(
            model, optimizer, train_loader, test_loader
        )

    mean = torch.stack(folds).mean(0)
    accuracy = (mean.argmax(-1) == targets[900:1201]).double().mean()
    accelerator.print(f"samples={len(mean)} accuracy={float(accuracy):.5f} logit={float(mean.abs().mean()):.4f}")


if __name__ == "__main__":
    main()
