# Files and folders of the notebook that a cell reads, and then removes, moves, replaces or writes anew.
# outcome: equal
# compare: values, listed, left

# %%
import json, os, shutil
import torch

for name in ("old", "new", "weights.pt", "count.json", "log.txt", "kept.txt", "moved.txt"):
    shutil.rmtree(name) if os.path.isdir(name) else os.path.exists(name) and os.remove(name)
os.makedirs("old/deep")
torch.save(torch.arange(4.0), "weights.pt")
with open("count.json", "w") as file:
    json.dump({"runs": 1}, file)
for name in ("log.txt", "kept.txt", "old/a.txt", "old/deep/b.txt"):
    with open(name, "w") as file:
        file.write(f"of the notebook: {name}\n")

# %% accelerate
import time

values = {}
for turn in range(2):  # rank 0 is ahead of the others in half of the cases
    values["weights", turn] = torch.load("weights.pt") if os.path.exists("weights.pt") else None
    if turn == 0:
        os.remove("weights.pt")
    with open("count.json") as file:
        count = json.load(file)
    count["runs"] += 1
    with open("count.json", "w") as file:
        json.dump(count, file)
    values["runs", turn] = count["runs"]
    with open("log.txt", "a") as file:
        file.write(f"turn {turn}\n")
    with open("log.txt") as file:
        values["log", turn] = file.read()
if os.path.exists("kept.txt"):
    with open("kept.txt") as file:
        values["kept"] = file.read()
    shutil.move("kept.txt", "moved.txt")
with open("moved.txt") as file:
    values["moved"] = file.read()
listed = [sorted(os.listdir("old")), sorted(os.listdir("old/deep"))]
with open("old/deep/b.txt") as file:
    values["deep"] = file.read()
shutil.rmtree("old")
os.makedirs("old", exist_ok=True)
listed.append(sorted(os.listdir("old")))

# %%
left = [sorted(name for name in os.listdir() if name != "values.json"), open("log.txt").read(), open("count.json").read()]
