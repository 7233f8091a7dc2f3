# Objects in sets and weak sets, and an iterator in an attribute, which other values of the notebook hold too.
# outcome: told contains new objects after the cell
# compare: numbers
# %%
import itertools
import weakref


class Node:
    known = weakref.WeakSet()

    def __init__(self, number):
        self.number = number
        Node.known.add(self)


class Log:
    def __init__(self):
        self.ids = itertools.count()


nodes = [Node(1), Node(2)]
chosen = set(nodes)
many = [Node(number) for number in range(300)]
first = many[0]
log = Log()
ids = (log.ids,)

# %% accelerate
for node in chosen:
    node.number += 10

# %% accelerate
for node in many:
    node.number += 10

# %% accelerate
next(log.ids)

# %% accelerate
numbers = sorted(node.number for node in Node.known)[:3]
