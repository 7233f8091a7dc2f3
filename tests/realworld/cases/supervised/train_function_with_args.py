# A train function in the style of the examples' scripts: args, model, device, loader, optimizer, epoch; log every few batches.
# outcome: equal
# compare: model, test_losses
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from types import SimpleNamespace
from torch.utils.data import DataLoader, TensorDataset

args = SimpleNamespace(batch_size=16, test_batch_size=50, epochs=2, lr=0.5, gamma=0.7, log_interval=4, dry_run=False)
images = torch.randn(120, 1, 8, 8)
labels = torch.randint(0, 4, (120,))
train_loader = DataLoader(TensorDataset(images[:90], labels[:90]), batch_size=args.batch_size, shuffle=True)
test_loader = DataLoader(TensorDataset(images[90:], labels[90:]), batch_size=args.test_batch_size)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.fc = nn.Linear(4 * 3 * 3, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv(x)), 2)
        x = torch.flatten(x, 1)
        return F.log_softmax(self.fc(x), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            seen = batch_idx * len(data)
            print(f"Train epoch {epoch} [{seen}/{len(train_loader.dataset)}] loss {loss.item():.6f}")
            if args.dry_run:
                break


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0, 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    return test_loss / len(test_loader.dataset), correct

# %% accelerate
def main():
    device = torch.device("cpu")
    model = ConvNet().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    results = []
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        results.append(test(model, device, test_loader))
        scheduler.step()
    return model, results


model, test_losses = main()
