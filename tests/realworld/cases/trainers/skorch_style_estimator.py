# A scikit-learn estimator around a module: fit, predict, score, in a Pipeline with a scaler and cross_val_score.
# outcome: equal
# compare: scores, net.module_, net.history_[-1]['valid_loss']
# needs: sklearn
# %%
import numpy as np
import torch
import torch.nn as nn
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_iris
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset


class NetClassifier(ClassifierMixin, BaseEstimator):
    def __init__(self, hidden=8, lr=0.1, max_epochs=2, batch_size=16):
        self.hidden, self.lr, self.max_epochs, self.batch_size = hidden, lr, max_epochs, batch_size

    def fit(self, X, y):
        torch.manual_seed(0)
        self.classes_ = np.unique(y)
        self.module_ = nn.Sequential(nn.Linear(X.shape[1], self.hidden), nn.ReLU(), nn.Linear(self.hidden, len(self.classes_)))
        self.optimizer_ = torch.optim.SGD(self.module_.parameters(), lr=self.lr, momentum=0.9)
        self.history_ = []
        x, t = torch.as_tensor(X), torch.as_tensor(y)
        cut = int(0.8 * len(x))
        order = torch.randperm(len(x))
        train, valid = order[:cut], order[cut:]
        loader = DataLoader(TensorDataset(x[train], t[train]), batch_size=self.batch_size, shuffle=True)
        for epoch in range(self.max_epochs):
            self.module_.train()
            for xb, yb in loader:
                self.train_step(xb, yb)
            self.module_.eval()
            with torch.no_grad():
                valid_loss = nn.functional.cross_entropy(self.module_(x[valid]), t[valid]).item()
            self.history_.append({"epoch": epoch, "valid_loss": valid_loss})
        return self

    def train_step(self, xb, yb):
        self.optimizer_.zero_grad()
        loss = nn.functional.cross_entropy(self.module_(xb), yb)
        loss.backward()
        self.optimizer_.step()
        return loss

    @torch.no_grad()
    def predict(self, X):
        return self.module_(torch.as_tensor(X)).argmax(1).numpy()


X, y = load_iris(return_X_y=True)
X, y = X[::2], y[::2]

# %% accelerate
scores = cross_val_score(make_pipeline(StandardScaler(), NetClassifier()), X, y, cv=3)
net = NetClassifier(max_epochs=3).fit(X, y)
