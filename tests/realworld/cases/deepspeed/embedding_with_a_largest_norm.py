# An embedding with max_norm in ZeRO stage 3, whose forward pass shortens the rows that it reads.
# outcome: refused is changed by the model's own code
# needs: deepspeed
# compare: model
# %%
import torch
import torch.nn as nn

torch.set_default_dtype(torch.float32)
tokens, labels = torch.randint(0, 9, (24, 5)), torch.randint(0, 2, (24,))
model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(20, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

# %% accelerate --strategy deepspeed --zero-stage 3
for start in range(0, 24, 8):
    loss = nn.functional.cross_entropy(model(tokens[start : start + 8]), labels[start : start + 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
