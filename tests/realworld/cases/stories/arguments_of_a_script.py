# A script pasted into a notebook: argparse with parse_args of an empty list, or of the kernel's own arguments.
# outcome: equal
# compare: args.lr, unknown, model
# %% accelerate
import argparse
import sys
import torch
import torch.nn as nn

parser = argparse.ArgumentParser(description="training")
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("-f", "--f", default="")
args, unknown = parser.parse_known_args()
unknown = len(unknown), sys.argv[0].endswith("ipykernel_launcher.py")
torch.manual_seed(0)
x, y = torch.randn(16, 2), torch.randn(16, 1)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for epoch in range(args.epochs):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
