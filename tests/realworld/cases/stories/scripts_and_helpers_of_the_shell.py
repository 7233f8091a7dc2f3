# Scripts of cell magics in the cell, and helpers of an earlier cell that use the shell and the standard streams.
# outcome: equal
# compare: log, found, failed, same, listed, folder, count, bar_count
# %%
import os
import shutil
import subprocess
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from IPython.display import HTML, clear_output, display
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

x, y = torch.randn(34, 6), torch.randint(0, 3, (34,))
loader = DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True)
model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shell = get_ipython()
shutil.rmtree("scripts", ignore_errors=True)


def set_up():
    !mkdir scripts && echo start >> scripts/log.txt
    %env KEPT_IN=scripts


def list_files():
    names = !ls scripts
    return list(names)


def record(text, file=sys.stdout):
    shell.system(f"echo {text} >> scripts/log.txt")
    print(text, file=file)
    display(HTML(f"<b>{text}</b>"))
    clear_output(wait=True)


class Tee:
    def __init__(self):
        self.stream, self.count = sys.stdout, 0

    def write(self, text):
        self.count += 1
        self.stream.write(text)


tee = Tee()
bar = tqdm(total=8)


# %% accelerate
set_up()
for epoch in range(2):
    for xb, yb in loader:
        loss = F.cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        bar.update()
    record(epoch)
    record(epoch, file=tee)
get_ipython().run_cell_magic("bash", "", "echo bash >> scripts/log.txt")
get_ipython().run_cell_magic("script", "sh --out found", "echo script >> scripts/log.txt; wc -l < scripts/log.txt")
try:
    get_ipython().run_cell_magic("sh", "", "echo sh >> scripts/log.txt; exit 3")
except subprocess.CalledProcessError as error:
    failed = error.returncode, error.cmd
same = shell is get_ipython(), os.environ["KEPT_IN"]
listed = list_files()
log = open("scripts/log.txt").read()

# %% accelerate
%%bash --out folder
echo whole >> scripts/log.txt
ls scripts

# %%
log += open("scripts/log.txt").read()
tee.write("after\n")
count = tee.count, tee.stream is sys.stdout, shell is get_ipython()
bar_count = bar.n
bar.close()
