# PPO: a rollout is made, advantages are normalized once, minibatches from a loader, clipped surrogate, entropy bonus.
# outcome: equal
# compare: actor, critic
# %%
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal
from torch.utils.data import DataLoader, TensorDataset

actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam([{"params": actor.parameters(), "lr": 3e-3}, {"params": critic.parameters(), "lr": 1e-2}])

# %%
states = torch.randn(40, 3)
with torch.no_grad():
    dist = Normal(actor(states), 0.5)
    actions = dist.sample()
    old_log_probs = dist.log_prob(actions)
returns = -(actions - states.sum(1, keepdim=True)) ** 2
advantages = returns - critic(states).detach()
advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
rollout = TensorDataset(states, actions, old_log_probs, returns, advantages)

# %% accelerate
for epoch in range(2):
    for s, a, old, ret, adv in DataLoader(rollout, batch_size=16, shuffle=True):
        dist = Normal(actor(s), 0.5)
        ratio = (dist.log_prob(a) - old).exp()
        surrogate = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        loss = -surrogate.mean() + 0.5 * F.mse_loss(critic(s), ret) - 0.01 * dist.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.5)
        optimizer.step()
