# Actor and critic in one network with two heads, policy losses and value losses stacked and summed.
# outcome: equal
# compare: model, lengths
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from collections import namedtuple
from torch.distributions import Categorical

SavedAction = namedtuple("SavedAction", ["log_prob", "value"])


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(4, 16)
        self.action_head, self.value_head = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.affine(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model = ActorCritic()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

# %% accelerate
lengths = []
for i_episode in range(4):
    state, saved, rewards = torch.zeros(4), [], []
    for t in range(12):
        probs, value = model(state)
        m = Categorical(probs)
        action = m.sample()
        saved.append(SavedAction(m.log_prob(action), value))
        state = torch.roll(state, 1) + 0.1 * (2 * action - 1)
        rewards.append(1.0)
        if state.abs().max() > 0.35:
            break
    R, returns = 0, []
    for r in rewards[::-1]:
        R = r + 0.9 * R
        returns.insert(0, R)
    policy_losses, value_losses = [], []
    for (log_prob, value), R in zip(saved, torch.tensor(returns)):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, R.unsqueeze(0)))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    lengths.append(t + 1)
