# Cells that log to an SQLite database, save a scripted model and load it again, and export the profiler's trace.
# outcome: told stayed on the workers: profiler
# compare: model, rows, scripted_output, output, is_trace

# %%
import json
import os
import sqlite3

import torch
from torch import nn
from torch.nn import functional as F

inputs, targets = torch.randn(32, 4), torch.randn(32, 1)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with sqlite3.connect("runs.db") as connection:
    connection.execute("create table seen (name text)")
    connection.execute("insert into seen values ('notebook')")


def train(epoch):
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    connection = sqlite3.connect("runs.db")
    connection.execute("create table if not exists losses (epoch integer, loss real)")
    connection.execute("insert into losses values (?, ?)", (epoch, round(loss.item(), 9)))
    connection.commit()
    count = connection.execute("select count(*) from losses").fetchone()[0]
    connection.close()
    assert count == epoch + 1, (count, epoch)


# %% accelerate
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    for epoch in range(3):
        train(epoch)
profiler.export_chrome_trace("trace.json")
assert json.load(open("trace.json"))["traceEvents"]

# %% accelerate
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
    model(inputs)
profiler.export_chrome_trace("missing/trace.json")  # torch logs an error and raises none

# %% accelerate
with sqlite3.connect("runs.db") as connection:
    connection.execute("create table done (name text)")
connection.close()
del connection
for epoch in range(3, 5):
    train(epoch)
torch.jit.save(torch.jit.script(model), "model.pt")
scripted = torch.jit.load("model.pt")
scripted_output = scripted(inputs).detach()
del scripted

# %%
output = model(inputs).detach()
scripted_output = torch.jit.load("model.pt")(inputs).detach() + 0 * scripted_output
tables = "select name from sqlite_master order by name"
connection = sqlite3.connect("runs.db")
rows = [*connection.execute(tables), *connection.execute("select * from losses"), *connection.execute("select * from seen")]
connection.close()
is_trace = bool(json.load(open("trace.json"))["traceEvents"])
os.remove("runs.db")
