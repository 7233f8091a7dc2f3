# A word model trained by hand over columns of text: get_batch, carried and detached hidden state, clipped gradients.
# outcome: equal
# compare: model, total_loss
# %%
import torch
import torch.nn as nn

ntokens, bptt, batch_size = 20, 5, 6
stream = torch.randint(0, ntokens, (240,))


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(ntokens, 10)
        self.rnn = nn.LSTM(10, 10)
        self.decoder = nn.Linear(10, ntokens)
        self.decoder.weight = self.encoder.weight

    def forward(self, x, hidden):
        output, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(output).view(-1, ntokens), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, 10), weight.new_zeros(1, bsz, 10)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i:i + seq_len], source[i + 1:i + 1 + seq_len].view(-1)


train_data = batchify(stream, batch_size)
model = RNNModel()
criterion = nn.CrossEntropyLoss()
lr = 1.0

# %% accelerate
def train():
    model.train()
    total_loss = 0.0
    hidden = model.init_hidden(batch_size)
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
    return total_loss


total_loss = train() + train()
