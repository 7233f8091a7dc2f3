# A network from the ground up: weight matrices in a list, a loop over batches by slicing, updates under no_grad.
# outcome: equal
# compare: params, accuracy
# needs: sklearn
# %%
import torch
from sklearn.datasets import load_digits

digits = load_digits()
train_x, train_y = torch.tensor(digits.data[:160] / 16), torch.tensor(digits.target[:160])


def init_params(size, variance=0.1):
    return (torch.randn(size) * variance).requires_grad_()


params = w1, b1, w2, b2 = init_params((64, 20)), init_params(20), init_params((20, 10)), init_params(10)


def simple_net(xb):
    return (xb @ w1 + b1).max(torch.tensor(0.0)) @ w2 + b2


def log_softmax(x):
    return x - x.exp().sum(-1).log().unsqueeze(-1)


def nll(prediction, target):
    return -prediction[range(target.shape[0]), target].mean()

# %% accelerate
bs, lr = 32, 0.5
for epoch in range(2):
    for i in range((len(train_x) - 1) // bs + 1):
        xb, yb = train_x[i * bs: i * bs + bs], train_y[i * bs: i * bs + bs]
        loss = nll(log_softmax(simple_net(xb)), yb)
        loss.backward()
        with torch.no_grad():
            for p in params:
                p -= p.grad * lr
                p.grad.zero_()
accuracy = (simple_net(train_x).argmax(1) == train_y).double().mean().item()
