# An LSTM whose state is made for as many sequences as came, in each batch anew.
# outcome: equal
# compare: model
# %%
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class LSTMRegressor(nn.Module):
    def __init__(self, hidden=8, layers=2):
        super().__init__()
        self.hidden, self.layers = hidden, layers
        self.lstm = nn.LSTM(1, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, 1)

    def forward(self, x):
        h0 = torch.zeros(self.layers, x.size(0), self.hidden)
        c0 = torch.zeros(self.layers, x.size(0), self.hidden)
        out, _ = self.lstm(x, (h0, c0))
        return self.fc(out[:, -1, :])


def sliding_windows(series, length):
    xs = [series[i:i + length] for i in range(len(series) - length)]
    ys = [series[i + length] for i in range(len(series) - length)]
    return torch.stack(xs).unsqueeze(-1), torch.stack(ys).unsqueeze(-1)


series = torch.sin(torch.arange(60) / 4)
X, y = sliding_windows(series, 8)
train_loader = DataLoader(TensorDataset(X, y), batch_size=10, shuffle=True)
model = LSTMRegressor()
criterion = nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

# %% accelerate
for epoch in range(2):
    for xb, yb in train_loader:
        outputs = model(xb)
        optimizer.zero_grad()
        loss = criterion(outputs, yb)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
