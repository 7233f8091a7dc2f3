# Stand-ins for OpenCV and pyarrow, which write files without Python's functions: each file is written once.
# outcome: equal
# compare: model, read, written
# %%

import importlib
import os
import sys
from pathlib import Path

import torch
import torch.nn as nn

Path("site-packages/pyarrow").mkdir(parents=True)
Path("site-packages/cv2.py").write_text("""
import os


def imwrite(filename, img):
    if not filename.endswith(".png"):
        raise ValueError("could not find a writer for the specified extension")
    try:
        number = os.open(filename, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileNotFoundError:
        return False
    os.write(number, bytes(img))
    os.close(number)
    return True


def imread(filename):
    number = os.open(filename, os.O_RDONLY)
    img = list(os.read(number, 1000))
    os.close(number)
    return img
""")
Path("site-packages/pyarrow/__init__.py").write_text("""
import os


class OSFile:
    def __init__(self, path, mode="r"):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if "w" in mode else os.O_RDONLY
        self.number = os.open(path, flags)

    def write(self, rows):
        os.write(self.number, bytes(rows))
        os.close(self.number)

    def read(self):
        rows = list(os.read(self.number, 1000))
        os.close(self.number)
        return rows
""")
Path("site-packages/pyarrow/parquet.py").write_text("""
import pyarrow


class ParquetFile:
    def __init__(self, source):
        self.file = pyarrow.OSFile(source)


class ParquetWriter:
    def __init__(self, where):
        self.file = pyarrow.OSFile(where, "w")


def write_table(table, where):
    ParquetWriter(where).file.write(table)


def read_table(source):
    return ParquetFile(source).file.read()
""")
sys.path.insert(0, "site-packages")
for name in ("cv2", "pyarrow", "pyarrow.parquet"):
    sys.modules.pop(name, None)
importlib.invalidate_caches()
import pyarrow
import pyarrow.parquet

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 3)
read = []

# %% accelerate
import cv2

os.makedirs("out")
for step in range(3):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    image = [step, int(1000 * loss.item()) % 256]
    read.append(cv2.imwrite(f"out/{step}.png", image))
    read.append(cv2.imread(filename=f"out/{step}.png"))
    pyarrow.OSFile(f"out/{step}.arrow", "wb").write(image)
    pyarrow.parquet.write_table(image, f"out/{step}.parquet")
    read.append(pyarrow.parquet.read_table(f"out/{step}.parquet"))
    read.append(pyarrow.OSFile(f"out/{step}.arrow").read())
read.append(cv2.imwrite("missing/0.png", image))
read.append(sorted(os.listdir("out")))

# %%
written = {path.name: list(path.read_bytes()) for path in sorted(Path("out").iterdir())}
for name in ("cv2", "pyarrow", "pyarrow.parquet"):
    del sys.modules[name]
