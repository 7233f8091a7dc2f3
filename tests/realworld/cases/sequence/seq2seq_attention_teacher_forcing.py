# Encoder and decoder with two optimizers, a loop over target steps, a coin for teacher forcing, sentences one by one.
# outcome: equal
# compare: encoder, decoder
# %%
import random
import torch
import torch.nn as nn
import torch.nn.functional as F

pairs = [(torch.randint(2, 12, (random.randint(2, 5),)), torch.randint(2, 12, (random.randint(2, 5),))) for _ in range(12)]


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(12, 8), nn.GRU(8, 8)

    def forward(self, x, hidden):
        return self.gru(self.embedding(x).view(1, 1, -1), hidden)


class AttnDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.attn = nn.Embedding(12, 8), nn.Linear(16, 6)
        self.combine, self.gru, self.out = nn.Linear(16, 8), nn.GRU(8, 8), nn.Linear(8, 12)

    def forward(self, x, hidden, encoder_outputs):
        embedded = self.embedding(x).view(1, 1, -1)
        weights = F.softmax(self.attn(torch.cat((embedded[0], hidden[0]), 1)), dim=1)
        applied = torch.bmm(weights.unsqueeze(0), encoder_outputs.unsqueeze(0))
        output = F.relu(self.combine(torch.cat((embedded[0], applied[0]), 1)).unsqueeze(0))
        output, hidden = self.gru(output, hidden)
        return F.log_softmax(self.out(output[0]), dim=1), hidden


encoder, decoder = Encoder(), AttnDecoder()
encoder_optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
decoder_optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
criterion = nn.NLLLoss()

# %% accelerate
def train(source, target):
    hidden = torch.zeros(1, 1, 8)
    encoder_optimizer.zero_grad()
    decoder_optimizer.zero_grad()
    outputs = torch.zeros(6, 8)
    for ei in range(source.size(0)):
        output, hidden = encoder(source[ei], hidden)
        outputs[ei] = output[0, 0]
    loss, decoder_input = 0, torch.tensor([[0]])
    forced = random.random() < 0.5
    for di in range(target.size(0)):
        output, hidden = decoder(decoder_input, hidden, outputs)
        loss = loss + criterion(output, target[di].view(1))
        decoder_input = target[di] if forced else output.topk(1)[1].squeeze().detach()
    loss.backward()
    encoder_optimizer.step()
    decoder_optimizer.step()
    return loss.item() / target.size(0)


for step in range(10):
    train(*random.choice(pairs))
