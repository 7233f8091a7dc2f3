# Weights are leaves of a tensor class of the notebook, held by layers that are no modules of torch, as in lessons that
# build a library from nothing; made in one cell, trained in two others and in a plain cell between.
# outcome: equal
# compare: [weight.detach().clone() for weight in layer.weights], losses, last_gradient, layer.weights[0].note
# %%
import torch
from torch import Tensor


class Weight(Tensor):
    def __new__(cls, start):
        return Tensor._make_subclass(cls, start, True)


class Layer:
    def __init__(self, inputs, outputs):
        self.scale = Weight(torch.randn(outputs, inputs) / inputs**0.5)
        self.shift = Weight(torch.zeros(outputs))
        self.scale.note = "drawn"
        self.weights = [self.scale, self.shift]

    def __call__(self, x):
        return x @ self.scale.t() + self.shift


class Descent:
    def __init__(self, weights, rate):
        self.weights, self.rate = list(weights), rate

    def step(self):
        for weight in self.weights:
            weight.data -= weight.grad.data * self.rate
            weight.grad.data.zero_()


x = torch.randn(24, 4)
y = x[:, :2] * 2
layer = Layer(4, 2)
descent = Descent(layer.weights, 0.1)
losses = []


def train(steps):
    for _ in range(steps):
        loss = ((layer(x) - y) ** 2).mean()
        loss.backward()
        descent.step()
        losses.append(loss.item())


# %% accelerate
train(2)
# %%
train(1)
# %% accelerate
train(1)
((layer(x) - y) ** 2).mean().backward()
# %%
last_gradient = [weight.grad.as_subclass(Tensor).clone() for weight in layer.weights]
