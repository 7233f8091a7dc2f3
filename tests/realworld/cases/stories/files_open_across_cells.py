# Files that one cell opens and others write to and read from: text, binary, csv, a logger class, on both sides.
# outcome: equal
# compare: texts, places, seen, closed
# runs: always
# %%
import csv
import logging


class Log:
    def __init__(self, path):
        self.file = open(path, "w", buffering=1)
        self.count = 0

    def add(self, *values):
        self.count += 1
        print(self.count, *values, file=self.file)


log = open("log.txt", "w", encoding="utf-8")
print("begins", file=log)
table = open("table.csv", "w", newline="")
rows = csv.DictWriter(table, fieldnames=["step", "loss"], delimiter=";")
rows.writeheader()
plain = open("plain.csv", "w", newline="\r\n")
plain_rows = csv.writer(plain, lineterminator="\n")
raw = open("raw.bin", "wb")
raw.write(b"\x00")
own = Log("own.txt")
handler = logging.FileHandler("handler.txt", mode="w")
logger = logging.getLogger("of_files")
logger.addHandler(handler)
logger.warning("begins")
with open("words.txt", "w") as words:
    words.write("one\ntwo\nthree\nfour\n")
source = open("words.txt")
seen = [source.readline()]

# %% accelerate
for step in range(2):
    log.write(f"ü {step}\n")
    rows.writerow({"step": step, "loss": step / 2})
    plain_rows.writerow([step, "a"])
    raw.write(bytes([step + 1]))
    own.add("step", step)
    logger.warning("step %d", step)
seen.append(source.readline())
places = [log.tell(), raw.tell()]
made = open("made.txt", "w")
made.write("made\n")
with open("words.txt") as words:
    pass

# %%
print("between", file=log)
rows.writerow({"step": "between", "loss": 0})
plain_rows.writerow(["between"])
raw.write(b"\xff")
own.add("between")
made.write("between\n")
logger.warning("between")
seen.append(source.readline())

# %% accelerate
log.write("last\n")
plain_rows.writerow(["last"])
table.close()
own.add("last")
made.write("last\n")
logger.warning("last")
seen.append(source.readline())
with open("made.txt") as again:
    again.read()

# %%
closed = [table.closed, words.closed, words.name, log.mode, raw.mode, made.name]
places += [log.tell(), made.tell()]
for file in (log, raw, own.file, made, source, plain):
    file.close()
handler.close()
paths = ("log.txt", "plain.csv", "table.csv", "raw.bin", "own.txt", "made.txt", "handler.txt")
texts = [open(path, "rb").read() for path in paths]
