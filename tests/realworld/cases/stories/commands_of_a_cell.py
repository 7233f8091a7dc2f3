# Commands that append to logs, and that read and change files of the cell: lines with "!", os.system and subprocess.
# outcome: equal
# compare: log, listed, sizes, missing, failed, status, raw, sorted_lines, kept, again, counted
# %%
import os
import shutil
import subprocess
from subprocess import check_output
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

x, y = torch.randn(34, 6), torch.randint(0, 3, (34,))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shutil.rmtree("commands", ignore_errors=True)
os.makedirs("old/folder", exist_ok=True)


# %% accelerate
def record(epoch, loss):
    !echo {epoch} {loss:.6f} >> commands/log.txt


shutil.rmtree("old")
!mkdir commands old && echo one >> old/log.txt
for epoch in range(2):
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    record(epoch, loss.item())
    !echo end of {epoch} >> commands/log.txt
    status = os.system(f"echo {epoch} >> commands/numbers.txt; exit 3")
listed = !ls commands
sizes = check_output(["wc", "-l", "commands/log.txt", "commands/numbers.txt"], text=True).split()
raw = subprocess.run("echo out; echo err >&2", shell=True, capture_output=True)
raw = (raw.args, raw.returncode, raw.stdout.decode(), raw.stderr.decode())
try:
    subprocess.run(["no-such-program"])
except FileNotFoundError as error:
    missing = (error.errno, error.filename)
try:
    subprocess.check_call(["sh", "-c", "exit 4"])
except subprocess.CalledProcessError as error:
    failed = (error.returncode, error.cmd)
with open("commands/names.txt", "w") as file:
    file.write("b\na\n")
!sort -o commands/names.txt commands/names.txt
sorted_lines = open("commands/names.txt").read()
with open("commands/copy.txt", "w") as file:
    subprocess.run(["cat", "commands/names.txt"], stdout=file, check=True)
kept = open("commands/copy.txt").read()
log = open("commands/log.txt").read()
os.remove("commands/names.txt")
!echo again > commands/names.txt
again = open("commands/names.txt").read()
counted = sorted(os.listdir("old")), len(open("old/log.txt").readlines())
del record
