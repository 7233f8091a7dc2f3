# The example's Transformer, time first: causal mask kept on the module, positional encoding as a buffer, Xavier-like init.
# outcome: equal
# compare: model
# %%
import math
import torch
import torch.nn as nn
import torch.nn.functional as F

ntoken, bptt = 18, 6
corpus = torch.randint(0, ntoken, (31, 8))


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=50):
        super().__init__()
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0).transpose(0, 1))

    def forward(self, x):
        return x + self.pe[:x.size(0), :]


class TransformerModel(nn.Transformer):
    def __init__(self):
        super().__init__(d_model=8, nhead=2, dim_feedforward=16, num_encoder_layers=1, dropout=0.0)
        self.src_mask = None
        self.pos_encoder = PositionalEncoding(8)
        self.input_emb = nn.Embedding(ntoken, 8)
        self.decoder = nn.Linear(8, ntoken)
        nn.init.uniform_(self.input_emb.weight, -0.1, 0.1)

    def forward(self, src):
        if self.src_mask is None or self.src_mask.size(0) != len(src):
            self.src_mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
        x = self.pos_encoder(self.input_emb(src) * math.sqrt(8))
        return F.log_softmax(self.decoder(self.encoder(x, mask=self.src_mask)), dim=-1)


model = TransformerModel()
model.encoder.register_buffer("scale", torch.ones(1).expand(8))
criterion = nn.NLLLoss()

# %% accelerate
lr = 0.5
for i in range(0, corpus.size(0) - 1, bptt):
    data, targets = corpus[i:i + bptt], corpus[i + 1:i + 1 + bptt]
    model.zero_grad()
    output = model(data[:len(targets)]).view(-1, ntoken)
    loss = criterion(output, targets.reshape(-1))
    loss.backward()
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-lr)
