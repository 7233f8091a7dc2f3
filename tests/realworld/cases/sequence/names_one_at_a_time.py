# Classifying names with a hand-written RNN cell: one name a step, characters one-hot, SGD written with add_.
# outcome: equal
# compare: rnn, all_losses
# %%
import random
import torch
import torch.nn as nn

names = {"A": ["anna", "ada", "alma", "amara"], "B": ["bob", "bruno", "bert", "bodo"], "C": ["cleo", "cora", "cyd", "carl"]}
letters = "abcdefghijklmnopqrstuvwxyz"


def line_to_tensor(line):
    tensor = torch.zeros(len(line), 1, len(letters))
    for i, letter in enumerate(line):
        tensor[i][0][letters.index(letter)] = 1
    return tensor


class RNN(nn.Module):
    def __init__(self, input_size, hidden_size, output_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = nn.Linear(input_size + hidden_size, hidden_size)
        self.h2o = nn.Linear(hidden_size, output_size)
        self.softmax = nn.LogSoftmax(dim=1)

    def forward(self, x, hidden):
        hidden = torch.tanh(self.i2h(torch.cat((x, hidden), 1)))
        return self.softmax(self.h2o(hidden)), hidden

    def init_hidden(self):
        return torch.zeros(1, self.hidden_size)


rnn = RNN(len(letters), 12, 3)
criterion = nn.NLLLoss()


def train_step(category, line):
    hidden = rnn.init_hidden()
    rnn.zero_grad()
    for i in range(line.size(0)):
        output, hidden = rnn(line[i], hidden)
    loss = criterion(output, category)
    loss.backward()
    for p in rnn.parameters():
        p.data.add_(p.grad.data, alpha=-0.05)
    return output, loss.item()

# %% accelerate
all_losses = []
for step in range(25):
    label = random.choice(list(names))
    name = random.choice(names[label])
    _, loss = train_step(torch.tensor([list(names).index(label)]), line_to_tensor(name))
    all_losses.append(loss)
