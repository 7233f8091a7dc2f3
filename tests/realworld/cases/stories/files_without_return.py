# A cell that returns nothing writes to files of the notebook: a log of an object, and csv rows.
# outcome: told the notebook's logger.file, rows.writer.file stays at its place in the file
# compare: text
# %%
import csv


class Logger:
    def __init__(self, path):
        self.file = open(path, "w")


logger = Logger("own.txt")
rows = csv.DictWriter(open("table.csv", "w"), ["step"])
source = open("table.csv")

# %% accelerate --no-return
logger.file.write("from the cell\n")
rows.writerow({"step": 1})
source.read()

# %%
logger.file.close()
text = open("own.txt").read()
