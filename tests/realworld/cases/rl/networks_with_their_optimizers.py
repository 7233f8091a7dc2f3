# Q-networks that carry their optimizer and loss; one of them has a method that trains it, another trains in `forward`.
# outcome: equal
# compare: losses, agent.online, agent.target, agent.online.optimizer, curious, curious.optimizers["all"]
# %%
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class QNetwork(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=rate)
        self.loss = nn.MSELoss()

    def forward(self, state):
        return self.layers(state)

    def learn(self, states, actions, targets):
        self.optimizer.zero_grad()
        loss = self.loss(self.forward(states)[torch.arange(len(states)), actions], targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()


class Curious(nn.Module):
    """Return the error of a prediction, which is trained in each call whose error is large."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.optimizers = {"all": torch.optim.Adam(self.parameters(), lr=0.1)}

    def forward(self, states, following):
        error = (self.layer(states) - following).pow(2).mean(1)
        if error.mean() > limit:
            self.optimizers["all"].zero_grad()
            error.mean().backward()
            self.optimizers["all"].step()
        return error.detach()


class Agent:
    def __init__(self):
        self.online, self.target = QNetwork(0.01), QNetwork(0.01)
        self.target.load_state_dict(self.online.state_dict())


np.random.seed(0)
agent, curious, limit = Agent(), Curious(), 0.9
losses = []

# %% accelerate
for step in range(24):
    states = torch.as_tensor(np.random.randn(16, 4)).to(torch.get_default_dtype())
    following = states.roll(1, 1) * (0.2 + step % 3)
    actions = torch.as_tensor(np.random.randint(0, 2, 16))
    with torch.no_grad():
        best = agent.target(following).max(1).values
    targets = curious(states, following) + 0.9 * best
    losses.append(agent.online.learn(states, actions, targets))
    if step % 5 == 0:
        agent.target.load_state_dict(agent.online.state_dict())
