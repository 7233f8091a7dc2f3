# REINFORCE with a small environment written by hand: log probabilities collected, returns normalized, losses summed.
# outcome: equal
# compare: policy, rewards_of_episodes
# %%
import torch
import torch.nn as nn
from torch.distributions import Categorical


class Corridor:
    def __init__(self, n=5):
        self.n = n

    def reset(self):
        self.position = 0
        return self.state()

    def state(self):
        s = torch.zeros(self.n)
        s[self.position] = 1
        return s

    def step(self, action):
        self.position = max(0, min(self.n - 1, self.position + (1 if action == 1 else -1)))
        done = self.position == self.n - 1
        return self.state(), 1.0 if done else -0.05, done


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(5, 16), nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return torch.softmax(self.affine2(torch.relu(self.affine1(x))), dim=1)


env = Corridor()
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
eps = 1e-8


def select_action(state):
    m = Categorical(policy(state.unsqueeze(0)))
    action = m.sample()
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(gamma=0.99):
    R, policy_loss, returns = 0, [], []
    for r in policy.rewards[::-1]:
        R = r + gamma * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std(unbiased=False) + eps)
    for log_prob, R in zip(policy.saved_log_probs, returns):
        policy_loss.append(-log_prob * R)
    optimizer.zero_grad()
    torch.cat(policy_loss).sum().backward()
    optimizer.step()
    del policy.rewards[:]
    del policy.saved_log_probs[:]

# %% accelerate
rewards_of_episodes = []
for episode in range(5):
    state, ep_reward = env.reset(), 0
    for t in range(15):
        action = select_action(state)
        state, reward, done = env.step(action)
        policy.rewards.append(reward)
        ep_reward += reward
        if done:
            break
    finish_episode()
    rewards_of_episodes.append(ep_reward)
