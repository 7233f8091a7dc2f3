# An environment with a generator that nothing seeds; the weights are those of the samples that it gave.
# outcome: equal
# compare: is_of_samples, num_samples
# %%
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Walk:
    def __init__(self):
        self.rng = np.random.default_rng()
        self.state = self.rng.normal(size=4)

    def step(self, action):
        self.state = 0.9 * self.state + 0.1 * action + 0.1 * self.rng.normal(size=4)
        return -np.abs(self.state).sum()


def make():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def update(net, optimizer, states, rewards):
    loss = F.mse_loss(net(states).amax(1), rewards)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# %% accelerate
net, optimizer = make()
env = Walk()
batches = []
for episode in range(5):
    states, rewards = [], []
    for _ in range(8):
        states.append(env.state)
        with torch.no_grad():
            action = net(torch.as_tensor(env.state)).argmax().item()
        rewards.append(env.step(action))
    batches.append((torch.as_tensor(np.array(states)), torch.as_tensor(np.array(rewards))))
    update(net, optimizer, *batches[-1])
# %%
again, again_optimizer = make()
for batch in batches:
    update(again, again_optimizer, *batch)
is_of_samples = all(torch.allclose(a, b) for a, b in zip(net.parameters(), again.parameters()))
num_samples = sum(len(rewards) for _, rewards in batches)
