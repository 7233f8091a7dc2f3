# scikit-learn calls fit, whose loop computes outputs before it clears gradients, of two networks that step in turn.
# outcome: equal
# compare: scores, net.encoder_, net.critic_, net.losses_
# needs: sklearn
# runs: always
# %%
import numpy as np
import torch
import torch.nn as nn
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.datasets import load_diabetes
from sklearn.model_selection import GridSearchCV


class Encoded(RegressorMixin, BaseEstimator):
    def __init__(self, hidden=4, epochs=2):
        self.hidden, self.epochs = hidden, epochs

    def fit(self, X, y):
        torch.manual_seed(0)
        self.encoder_ = nn.Sequential(nn.Linear(X.shape[1], self.hidden), nn.Tanh(), nn.Dropout(0.2))
        self.critic_ = nn.Sequential(nn.Linear(self.hidden, 4), nn.ReLU(), nn.Linear(4, 1))
        of_critic = torch.optim.Adam(self.critic_.parameters(), lr=0.01)
        of_encoder = torch.optim.SGD(self.encoder_.parameters(), lr=0.1, momentum=0.9)
        self.losses_ = []
        for _ in range(self.epochs):
            self.encoder_.train()
            for rows in np.array_split(np.random.permutation(len(X)), 4):
                codes = self.encoder_(torch.as_tensor(X[rows]))
                targets = torch.as_tensor(y[rows]).unsqueeze(1)
                loss = nn.functional.mse_loss(self.critic_(codes.detach()), targets)
                of_critic.zero_grad()
                loss.backward()
                of_critic.step()
                loss = nn.functional.mse_loss(self.critic_(codes), targets) + codes.pow(2).mean()
                of_encoder.zero_grad()
                loss.backward()
                of_encoder.step()
                self.losses_.append(loss.item())
        return self

    def predict(self, X):
        self.encoder_.eval()
        with torch.no_grad():
            return self.critic_(self.encoder_(torch.as_tensor(X))).squeeze(1).numpy()


X, y = load_diabetes(return_X_y=True)
X, y = 10 * X[:80], (y[:80] - 150) / 80

# %% accelerate
np.random.seed(0)
search = GridSearchCV(Encoded(), {"hidden": [3, 5]}, cv=2).fit(X, y)
scores, net = search.cv_results_["mean_test_score"], search.best_estimator_
