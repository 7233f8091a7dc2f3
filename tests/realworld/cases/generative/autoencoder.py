# An encoder and a decoder in one optimizer, mean squared error, the picture of reconstructions at the end.
# outcome: equal
# compare: encoder, decoder, reconstructed
# needs: sklearn
# %%
import itertools
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

images = torch.tensor(load_digits().images[:150] / 16).unsqueeze(1)
loader = DataLoader(images, batch_size=32, shuffle=True)
encoder = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6))
decoder = nn.Sequential(
    nn.Linear(6, 64), nn.ReLU(), nn.Unflatten(1, (4, 4, 4)),
    nn.ConvTranspose2d(4, 1, 3, stride=2, padding=1, output_padding=1), nn.Sigmoid(),
)
optimizer = torch.optim.Adam(itertools.chain(encoder.parameters(), decoder.parameters()), lr=3e-3)

# %% accelerate
for epoch in range(2):
    for batch in loader:
        output = decoder(encoder(batch))
        loss = nn.MSELoss()(output, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
with torch.no_grad():
    reconstructed = decoder(encoder(images[:4]))
fig, axes = plt.subplots(1, 4)
for axis, picture in zip(axes, reconstructed):
    axis.imshow(picture.squeeze())
