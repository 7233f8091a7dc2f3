"""Evaluate on a number of samples that no batch and no number of processes divides."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=32)
    args = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    digits = load_digits()
    inputs = torch.tensor(digits.data[:1003], dtype=torch.float32) / 16
    dataset = TensorDataset(inputs, torch.tensor(digits.target[:1003]))
    model = nn.Linear(64, 10)
    loader = DataLoader(dataset, batch_size=args.batch_size)
    model, loader = accelerator.prepare(model, loader)

    model.eval()
    predictions, references = [], []
    for inputs, targets in loader:
        with torch.no_grad():
            logits = model(inputs)
        found, wanted = accelerator.gather_for_metrics((logits.argmax(-1), targets))
        predictions.append(found)
        references.append(wanted)
    predictions, references = torch.cat(predictions), torch.cat(references)
    ragged = torch.ones(accelerator.process_index + 1)
    padded = accelerator.gather(accelerator.pad_across_processes(ragged))

    accelerator.print(f"samples={len(predictions)} in order={references.tolist() == digits.target[:1003].tolist()}")
    accelerator.print(f"accuracy={(predictions == references).double().mean():.6f}")
    accelerator.print(f"padded={len(padded) == accelerator.num_processes**2}")


if __name__ == "__main__":
    main()
