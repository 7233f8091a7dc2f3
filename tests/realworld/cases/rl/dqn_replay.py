# DQN: replay memory with random.sample, target network with soft updates, epsilon-greedy, clipped gradient values.
# outcome: equal
# compare: policy_net, target_net, steps_done
# %%
import math
import random
import torch
import torch.nn as nn
from collections import deque, namedtuple

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)


class DQN(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x):
        return self.layers(x)


policy_net, target_net = DQN(), DQN()
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-2, amsgrad=True)
memory = ReplayMemory(100)
steps_done = 0
BATCH_SIZE, GAMMA, TAU = 8, 0.9, 0.1

# %% accelerate
def select_action(state):
    global steps_done
    threshold = 0.1 + 0.8 * math.exp(-steps_done / 20)
    steps_done += 1
    if random.random() > threshold:
        with torch.no_grad():
            return policy_net(state).max(1).indices.view(1, 1)
    return torch.tensor([[random.randrange(2)]])


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    batch = Transition(*zip(*memory.sample(BATCH_SIZE)))
    mask = torch.tensor([s is not None for s in batch.next_state])
    non_final = torch.cat([s for s in batch.next_state if s is not None])
    state_batch, action_batch, reward_batch = torch.cat(batch.state), torch.cat(batch.action), torch.cat(batch.reward)
    values = policy_net(state_batch).gather(1, action_batch)
    next_values = torch.zeros(BATCH_SIZE)
    with torch.no_grad():
        next_values[mask] = target_net(non_final).max(1).values
    expected = next_values * GAMMA + reward_batch
    loss = nn.SmoothL1Loss()(values, expected.unsqueeze(1))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(policy_net.parameters(), 100)
    optimizer.step()


for episode in range(4):
    state = torch.zeros(1, 3)
    for t in range(10):
        action = select_action(state)
        next_state = state + 0.2 * (2 * action.double() - 1) * torch.tensor([[1.0, 0.5, -0.5]])
        reward = -next_state.abs().sum().view(1)
        done = next_state.abs().max() > 0.7
        memory.push(state, action, None if done else next_state, reward)
        state = next_state
        optimize_model()
        target_state, policy_state = target_net.state_dict(), policy_net.state_dict()
        for key in policy_state:
            target_state[key] = policy_state[key] * TAU + target_state[key] * (1 - TAU)
        target_net.load_state_dict(target_state)
        if done:
            break
