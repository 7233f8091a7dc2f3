"""Objects that two values of the notebook hold: each stays one object, whichever of them a cell changes it through."""

from __future__ import annotations

import pytest

from tests.notebook.cells import done, setup
from tests.support.kernel import Kernel
from tests.support.nightly import nightly

_DEFINITIONS = """
import argparse, array, collections, copy, dataclasses, decimal, enum, functools, io, random, types
import numpy as np, torch
from torch import nn

class Box: pass

class Reduced:
    def __init__(self, n): self.n = n
    def __reduce__(self): return Reduced, (self.n,)

class Stateful:
    def __init__(self): self.n = 0
    def __getstate__(self): return {"n": self.n}
    def __setstate__(self, state): self.n = state["n"]

class ByKey(dict):
    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__

class Named(dict):
    def __getattr__(self, name):
        try: return self[name]
        except KeyError: raise AttributeError(name) from None
    __setattr__ = dict.__setitem__

@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    items: list

def bare(): pass

Pair = collections.namedtuple("Pair", "first second")

def counter():
    count = 0
    def step():
        nonlocal count
        count += 1
    return step

# How to make an object, to change it, and to read it.
KINDS = {
    "list": (lambda: [1], lambda x: x.append(2), list),
    "dict": (lambda: {"a": [1, {"b": 2}]}, lambda x: x["a"][1].update(c=3), repr),
    "set": (lambda: {1}, lambda x: x.add(2), sorted),
    "deque": (lambda: collections.deque([1], maxlen=3), lambda x: x.append(2), list),
    "defaultdict": (lambda: collections.defaultdict(list), lambda x: x["k"].append(1), lambda x: sorted(x.items())),
    "namespace of a library": (lambda: argparse.Namespace(a=1), lambda x: setattr(x, "a", 2), lambda x: x.a),
    "dict of a class": (lambda: Named(a=1), lambda x: setattr(x, "b", 2), lambda x: sorted(x.items())),
    "dict by attributes": (lambda: ByKey(a=1), lambda x: setattr(x, "b", 2), lambda x: sorted(x.items())),
    "bytearray": (lambda: bytearray(b"a"), lambda x: x.extend(b"b"), bytes),
    "array": (lambda: array.array("d", [1.0]), lambda x: x.append(2.0), list),
    "object": (Box, lambda x: setattr(x, "n", [1]), lambda x: getattr(x, "n", None)),
    "object with __reduce__": (lambda: Reduced(1), lambda x: setattr(x, "n", 2), lambda x: x.n),
    "object with a state": (Stateful, lambda x: setattr(x, "n", 2), lambda x: x.n),
    "frozen dataclass with slots": (lambda: Frozen([1]), lambda x: x.items.append(2), repr),
    "function": (lambda: types.FunctionType(bare.__code__, globals()), lambda x: setattr(x, "calls", 1), vars),
    "named tuple": (lambda: Pair([1], 2), lambda x: x.first.append(1), repr),
    "closure": (counter, lambda x: x(), lambda x: x.__closure__[0].cell_contents),
    "partial": (lambda: functools.partial(print, [1]), lambda x: x.args[0].append(2), lambda x: x.args),
    "NumPy's array": (lambda: np.zeros(3), lambda x: x.__setitem__(1, 5), lambda x: x.tolist()),
    "array of objects": (lambda: np.array([[1], None], object), lambda x: x[0].append(1), repr),
    "masked array": (lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0]), lambda x: x.__setitem__(0, 9), repr),
    "matrix": (lambda: np.matrix([[1, 2]]), lambda x: x.fill(4), lambda x: x.tolist()),
    "tensor": (lambda: torch.zeros(3), lambda x: x.add_(1), lambda x: x.tolist()),
    "resized tensor": (lambda: torch.zeros(3), lambda x: x.resize_(4).fill_(1), lambda x: x.tolist()),
    "sparse tensor": (lambda: torch.eye(2).to_sparse(), lambda x: x.mul_(2), lambda x: x.to_dense().tolist()),
    "parameter": (lambda: nn.Parameter(torch.zeros(3)), lambda x: x.data.add_(1), lambda x: x.tolist()),
    "random": (lambda: random.Random(0), lambda x: x.random(), lambda x: hash(x.getstate())),
    "generator": (torch.Generator, lambda x: torch.rand(1, generator=x), lambda x: hash(str(x.get_state()))),
    "text in memory": (io.StringIO, lambda x: x.write("abc"), lambda x: (x.getvalue(), x.tell())),
    "decimal context": (lambda: decimal.Context(prec=5), lambda x: setattr(x, "prec", 7), lambda x: x.prec),
    "exception": (lambda: ValueError("a"), lambda x: setattr(x, "note", [1]), lambda x: getattr(x, "note", None)),
}

def with_attribute(owner, value):
    object.__setattr__(owner, "own", value)
    return owner

def class_with(value):
    class Own: attribute = value
    return Own

class Described:
    def __init__(self, own): self.own = own
    def __get__(self, owner, kind): return self.own

def sgd(): return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)

# How to make a value that holds an object, and to read the object from it.
HOLDERS = {
    "object": (lambda x: with_attribute(Box(), x), lambda h: h.own),
    "list": (lambda x: [0, x], lambda h: h[1]),
    "dict": (lambda x: {"k": x}, lambda h: h["k"]),
    "tuple": (lambda x: (0, x), lambda h: h[1]),
    "long list": (lambda x: [*([i] for i in range(100)), x], lambda h: h[-1]),
    "deep": (lambda x: {"a": [with_attribute(Box(), [x])]}, lambda h: h["a"][0].own[0]),
    "model": (lambda x: with_attribute(nn.Linear(1, 1), x), lambda h: vars(h)["own"]),
    "optimizer": (lambda x: with_attribute(sgd(), x), lambda h: h.own),
    "scheduler": (lambda x: with_attribute(torch.optim.lr_scheduler.StepLR(sgd(), 1), x), lambda h: h.own),
    "function": (lambda x: (lambda: x), lambda h: h()),
    "default": (lambda x: (lambda own=x: own), lambda h: h()),
    "partial": (lambda x: functools.partial(int, x), lambda h: h.args[0]),
    "array of objects": (lambda x: np.array([x, None, 0, x], object)[:1].copy(), lambda h: h[0]),
    "named tuple": (lambda x: Pair(x, 1), lambda h: h.first),
    "class": (class_with, lambda h: vars(h)["attribute"]),
    "descriptor": (lambda x: class_with(Described(x)), lambda h: h.attribute),
    "member of an enumeration": (lambda x: enum.Enum("Own", {"A": Pair(x, len(PAIRS))}), lambda h: h.A.value.first),
}
# Of these, the workers return new objects: other values hold them too where the cell has the names of both.
REPLACED = ("object with __reduce__", "decimal context", "exception")
PAIRS = [(kind, holder) for kind in KINDS for holder in HOLDERS]
PAIRS = [pair for pair in PAIRS if pair[0] not in REPLACED or pair[1] != "member of an enumeration"]

def make_all():
    for number, (kind, holder) in enumerate(PAIRS):
        x = KINDS[kind][0]()
        h = np.empty(1, object) if holder == "array of objects" else HOLDERS[holder][0](x)
        if holder == "array of objects":
            h[0] = x
        globals().update({f"x{number}": x, f"h{number}": h})

def read_all():
    found = []
    for number, (kind, holder) in enumerate(PAIRS):
        x, own = globals()[f"x{number}"], HOLDERS[holder][1](globals()[f"h{number}"])
        found.append(f"{kind} in {holder}: {KINDS[kind][2](own)} {KINDS[kind][2](x)} {own is x}")
    return found
"""


@pytest.mark.parametrize("through", [nightly("name"), "holder"])
def test_an_object_that_two_values_hold_stays_one(kernel: Kernel, through: str) -> None:
    assert kernel.run(_DEFINITIONS).error is None
    num_pairs = int(kernel.run("print(len(PAIRS))").stdout)
    object_of = "x{}" if through == "name" else "HOLDERS[PAIRS[{0}][1]][1](h{0})"
    cell = "\n".join(f"KINDS[PAIRS[{n}][0]][1]({object_of.format(n)})" for n in range(num_pairs))
    replaced = kernel.run("print(*[n for n, (kind, _) in enumerate(PAIRS) if kind in REPLACED])").stdout.split()
    cell += "".join(f"\nx{n}, h{n}" for n in replaced)
    assert kernel.run(f"make_all()\n{cell}\nplain = read_all()\nmake_all()").error is None
    output = kernel.run(f"%%accelerate --cpus 2\n{cell}\nNone")
    assert output.error is None, output.traceback
    different = "[(there, here) for there, here in zip(read_all(), plain) if there != here]"
    assert kernel.run(f"print(*{different}, sep='\\n')").stdout.strip() == ""


_REPLACED = """
class Reduced:
    def __init__(self, n): self.n = n
    def __reduce__(self): return Reduced, (self.n,)

x, items = Reduced(1), iter([1, 2, 3])
other_name, in_list, in_closure, in_tuple = x, [x], (lambda own: lambda: own)(x), (items,)
class Holder: own = {"k": x, "items": items}
"""


def test_a_new_object_takes_the_place_of_the_one_of_before_and_the_other_places_are_named(kernel: Kernel) -> None:
    assert kernel.run(_REPLACED).error is None
    output = kernel.run("%%accelerate --cpus 2\nx.n = next(items) + 4")
    assert output.error is None, output.traceback
    same = "[other_name is x, in_list[0] is x, in_closure() is x, Holder.own['k'] is x, Holder.own['items'] is items]"
    assert kernel.run(f"print(x.n, {same}, next(items), in_tuple[0] is items)").stdout.split("\n")[0] == (
        "5 [True, True, True, True, True] 2 False"
    )
    told = [line for text in output.texts for line in text.split("\n") if "new object" in line]
    assert len(told) == 1
    assert "items is a new object, since a list_iterator cannot be changed in place" in told[0]


def test_items_of_frozen_sets_that_are_new_objects_are_named(kernel: Kernel) -> None:
    code = "class Node: pass\nfirst, second = Node(), Node()\nchosen, box = frozenset([first]), [frozenset([second])]"
    assert kernel.run(code).error is None
    output = kernel.run("%%accelerate --cpus 2\nfor node in (*chosen, *box[0]): node.seen = True")
    assert output.error is None, output.traceback
    told = [line.partition(" contains new objects")[0] for line in "\n".join(output.texts).split("\n")]
    assert {"chosen", "box"} <= {*told}


def test_tensors_and_models_that_a_cell_changes_before_it_binds_their_names_anew_are_changed_in_other_values(
    kernel: Kernel,
) -> None:
    setup(
        kernel,
        "import numpy as np, torch\nscores, counts, net = torch.zeros(3), np.zeros(2), torch.nn.Linear(1, 1)\n"
        "history, zoo = [scores, counts], {'net': net}",
    )
    done(
        kernel,
        "scores += 1\nscores = scores * 2\ncounts += 3\ncounts = counts + 1\n"
        "torch.nn.init.constant_(net.weight, 7.)\nnet = torch.nn.Linear(2, 2)",
    )
    assert kernel.value("(scores.tolist(), counts.tolist(), len(net.bias))") == ([2.0] * 3, [4.0] * 2, 2)
    assert kernel.value("([v.tolist() for v in history], zoo['net'].weight.item())") == ([[1.0] * 3, [3.0] * 2], 7.0)
