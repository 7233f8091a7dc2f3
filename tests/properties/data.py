"""Data of random programs: tensors, data sets and loaders."""

from __future__ import annotations

from dataclasses import dataclass

from tests.properties.choices import Choices
from tests.properties.losses import Loss

INPUTS = {
    "vectors": "x = torch.randn(N, 5)",
    "images": "x = torch.randn(N, 2, 5, 5)",
    "sequences": "x = torch.randn(N, 4, 3)",
    "tokens": "x = torch.randint(0, 11, (N, 6))",
    "texts": "x = [torch.randint(1, 11, (int(n),)) for n in torch.randint(2, 7, (N,))]",
}
"""The lines that make the inputs of N samples. A text is a tensor of any length."""

_SIZES = {
    "27 in batches of 8": (27, 8),
    "24 in batches of 8": (24, 8),
    "26 in batches of 8": (26, 8),
    "25 in batches of 8": (25, 8),
    "27 in batches of 5": (27, 5),
    "17 in batches of 4": (17, 4),
    "13 in batches of 2": (13, 2),
}

_COLLATE = """\
def collate(samples):
    texts, *others = zip(*samples)
    padded = nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    return [padded, *(torch.stack(column) for column in others)]
"""
_COLLATE_DICT = """\
def collate(samples):
    names = ['x', 'y', 'w'][:len(samples[0])]
    return {name: torch.stack(column) for name, column in zip(names, zip(*samples))}
"""
_COLLATE_OBJECT = """\
@dataclasses.dataclass
class Batch:
    parts: list
    names: tuple = ('x', 'y', 'w')
    def __len__(self):
        return len(self.parts)
    def __getattr__(self, name):
        if name.startswith('__') or name not in ('x', 'y', 'w'):
            raise AttributeError(name)
        return self.parts[self.names.index(name)]
def collate(samples):
    return Batch([torch.stack(column) for column in zip(*samples)])
"""
_COLLATE_DICT_TEXTS = """\
def collate(samples):
    names = ['x', 'y', 'w'][:len(samples[0])]
    columns = dict(zip(names, zip(*samples)))
    columns['x'] = nn.utils.rnn.pad_sequence(list(columns['x']), batch_first=True)
    return {name: column if name == 'x' else torch.stack(column) for name, column in columns.items()}
"""


@dataclass(frozen=True)
class Data:
    """The lines that make ``loader``, and how a batch of it is read."""

    lines: str
    unpack: str
    """Assigns xb, yb and perhaps wb from ``batch``."""
    columns: tuple[str, ...]
    """The names of the whole tensors."""
    num_batches: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names that a batch is unpacked to."""
        return tuple(f"{column}b" for column in self.columns)


def make_data(choices: Choices, inputs: str, loss: Loss, *, drops: bool, min_batch: int, is_iterated: bool) -> Data:
    """Return the data of a program; its smallest batch has at least ``min_batch`` samples.

    ``drops`` is whether batches must be full, ``is_iterated`` is whether all
    samples come from the loader.
    """
    possible = [name for name, (count, size) in _SIZES.items() if size >= min_batch]
    tail_ok = [name for name in possible if _SIZES[name][0] % _SIZES[name][1] in (0, *range(min_batch, 99))]
    drops = drops or choices.flip("drop_last", probability=0.12)
    size = choices.pick("sizes", *(possible if drops else tail_ok), simple=0.5)
    count, batch = _SIZES[size]
    lines = [f"N, BATCH = {count}, {batch}", INPUTS[inputs]]
    if loss.target == "values":
        lines.append("y = torch.randn(N, 2)")
    else:
        lines.append("y = torch.randint(0, 3, (N,))")
        if loss.ignores_labels:
            lines.append("y[2] = y[4] = -1")
    columns = ["x", "y"]
    if loss.uses_weights:
        lines.append("w = torch.rand(N) + 0.5")
        columns.append("w")
    kinds = ["list", "class"]
    if inputs != "texts":
        kinds = ["tensors", *kinds, "subset", "concatenated", "cached", "dicts", "named tuples", "stacked"]
    if is_iterated:
        kinds += ["iterable"] if inputs == "texts" else ["iterable", "split"]
    kind = choices.pick("dataset", *kinds, simple=0.6)
    joined = ", ".join(columns)
    if kind == "list":
        lines.append(f"dataset = list(zip({joined}))")
    elif kind == "class":
        items = ", ".join(f"{name}[index]" for name in columns)
        lines.append(
            f"class Samples(torch.utils.data.Dataset):\n    def __len__(self):\n        return N\n"
            f"    def __getitem__(self, index):\n        return {items}\ndataset = Samples()"
        )
    elif kind == "concatenated":
        halves = [", ".join(f"{name}[{rows}]" for name in columns) for rows in (":9", "9:")]
        lines.append(f"dataset = TensorDataset({halves[0]}) + TensorDataset({halves[1]})")
    elif kind == "cached":
        items = ", ".join(f"{name}[index]" for name in columns)
        lines.append(
            "class Cached(torch.utils.data.Dataset):\n    reads = 0\n"
            "    def __init__(self):\n        self.cache = {}\n    def __len__(self):\n        return N\n"
            "    def __getitem__(self, index):\n        Cached.reads += 1\n        if index not in self.cache:\n"
            f"            self.cache[index] = {items}\n        return self.cache[index]\ndataset = Cached()"
        )
    elif kind == "dicts":
        items = ", ".join(f"{name}={name}[index]" for name in columns)
        lines.append(f"dataset = [dict({items}, name=f'sample {{index}}') for index in range(N)]")
    elif kind == "named tuples":
        lines.append(f"Sample = collections.namedtuple('Sample', '{' '.join(columns)}')")
        lines.append(f"dataset = [Sample(*columns) for columns in zip({joined})]")
    elif kind == "stacked":
        lines.append(f"dataset = torch.utils.data.StackDataset({', '.join(f'{name}={name}' for name in columns)})")
    elif kind == "iterable":
        lines.append(
            "class Stream(torch.utils.data.IterableDataset):\n    def __len__(self):\n        return N\n"
            "    def __iter__(self):\n"
            f"        return iter(zip({joined}))\ndataset = Stream()"
        )
    else:
        lines.append(f"dataset = TensorDataset({joined})")
    if kind == "split":
        lines[0] = f"N, BATCH = {count + 7}, {batch}"  # the part that trains has the wanted size
        lines.append(f"dataset, held_out = torch.utils.data.random_split(dataset, [{count}, 7])")
    elif kind == "subset":
        lines.append("dataset = torch.utils.data.Subset(dataset, torch.randperm(N).tolist())")
    arguments = [f"batch_size={batch}"]
    orders = ["in order"]
    if kind != "iterable":
        orders += ["shuffled", "shuffled by a generator"]
        orders += [] if loss.ignores_labels else ["weighted sampler"]  # a batch must have a label that counts
        orders += [] if drops else ["batch sampler"]
        orders.append("sampler that counts")
        orders += [] if loss.ignores_labels else ["drawn with replacement"]
    order = choices.pick("order", *orders, simple=0.4)
    if order == "shuffled":
        arguments.append("shuffle=True")
    elif order == "shuffled by a generator":
        arguments.append("shuffle=True, generator=torch.Generator().manual_seed(11)")
    elif order == "weighted sampler":
        lines.append("sampler = torch.utils.data.WeightedRandomSampler(torch.rand(len(dataset)), len(dataset))")
        arguments.append("sampler=sampler")
    elif order == "batch sampler":
        lines.append(
            "class Buckets(torch.utils.data.Sampler):\n    def __len__(self):\n"
            "        return -(-len(dataset) // BATCH)\n    def __iter__(self):\n"
            "        order = torch.randperm(len(dataset))\n"
            "        return iter([rows.tolist() for rows in order.split(BATCH)])"
        )
        arguments = ["batch_sampler=Buckets()"]
    elif order == "sampler that counts":
        lines.append(
            "class Order(torch.utils.data.Sampler):\n    def __init__(self):\n"
            "        self.epoch, self.random = 0, random.Random(3)\n    def __len__(self):\n"
            "        return len(dataset)\n    def __iter__(self):\n        self.epoch += 1\n"
            "        order = list(range(len(dataset)))\n        self.random.shuffle(order)\n"
            "        yield from order[self.epoch:] + order[:self.epoch]"
        )
        arguments.append("sampler=Order()")
    elif order == "drawn with replacement":
        lines.append("sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=len(dataset))")
        arguments.append("sampler=sampler")
    if drops:
        arguments.append("drop_last=True")
    is_named = kind in ("dicts", "stacked")
    forms = ["dict"] if is_named else ["tuple", "dict"] if inputs == "texts" else ["tuple", "dict", "object"]
    form = choices.pick("batch", *forms, simple=0.8)
    has_class = form == "object" or kind == "named tuples"  # which cannot be sent from a process
    if not has_class and choices.flip("loader's process", probability=0.02):
        arguments.append("num_workers=1")
    if form == "object":
        lines.append(_COLLATE_OBJECT)
        arguments.append("collate_fn=collate")
    elif form == "dict" and not is_named:
        lines.append(_COLLATE_DICT_TEXTS if inputs == "texts" else _COLLATE_DICT)
        arguments.append("collate_fn=collate")
    elif inputs == "texts":
        lines.append(_COLLATE)
        arguments.append("collate_fn=collate")
    lines.append(f"loader = DataLoader(dataset, {', '.join(arguments)})")
    names = ", ".join(f"{column}b" for column in columns)
    parts = {"tuple": "batch", "dict": ", ".join(f"batch['{c}']" for c in columns)}
    unpack = f"{names} = {parts.get(form) or ', '.join(f'batch.{c}' for c in columns)}"
    num_batches = count // batch if drops else -(-count // batch)
    return Data("\n".join(line for line in lines if line), unpack, tuple(columns), num_batches)
