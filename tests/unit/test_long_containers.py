"""Containers with more items than paths: random programs that change them on both sides, and the data that is sent."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from accel_nb.pool.local.shared_payloads import SharedPayloads
from accel_nb.pool.sync.namespace_sync import NamespaceDelta
from tests.support.namespace_sides import Sides
from tests.support.nightly import nightly

SETUP = """
import random
from collections import deque, OrderedDict
from types import SimpleNamespace
import numpy as np, torch
data = [{"i": i, "l": [i]} for i in range(150)]
buffer = deque([(np.full(2, float(i)), i, (torch.full((2,), float(i)), [i])) for i in range(140)], maxlen=145)
table = OrderedDict((i, [i]) for i in range(140))
box = SimpleNamespace(samples=[SimpleNamespace(x=i) for i in range(160)], count=0)
part, one, item = data[:5], data[7], box.samples[9]
"""
STATEMENTS = [
    "random.Random(n).shuffle(data)",
    "data.append({'i': n, 'l': []})",
    "data.pop(n % len(data))",
    "data[n % len(data)]['i'] += 1",
    "data[n % len(data)]['l'].append(n)",
    "data.sort(key=lambda record: record['i'])",
    "data = data[::-1]",
    "data = [record for record in data if record['i'] % 19 != n % 19]",
    "part = data[n % 20 : n % 20 + 5]",
    "part.append(one)",
    "part[0]['i'] = n",
    "one = data[n % len(data)]",
    "one['i'] -= 1",
    "buffer.append((np.full(2, float(n)), n, (torch.full((2,), float(n)), [n])))",
    "buffer[3][0][0] += 1",
    "buffer[5][2][0].add_(1)",
    "buffer[6][2][1].append(n)",
    "buffer.rotate(n % 7)",
    "buffer.append(buffer[0])",
    "table[n % 140 if n % 140 in table else 'new'] = table[3]",
    "table[3].append(n)",
    "table.move_to_end(5)",
    "box.samples = box.samples[2:] if len(box.samples) > 135 else box.samples * 2",
    "box.samples.append(item)",
    "box.samples[n % 100].x = n",
    "item = box.samples[n % 50]",
    "item.x = one",
    "box.count += 1",
]
NAMES = ("data", "buffer", "table", "box", "part", "one", "item")


def dump(value: Any, seen: dict[int, int]) -> Any:
    """Return a value as one that compares, in which each object has a number."""
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, tuple):
        return tuple(dump(part, seen) for part in value)
    if id(value) in seen:
        return f"object {seen[id(value)]}"
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray | torch.Tensor):
        return type(value).__name__, value.tolist()
    if isinstance(value, SimpleNamespace):
        return "namespace", dump(vars(value), seen)
    if isinstance(value, dict):
        return [(key, dump(part, seen)) for key, part in value.items()]
    return type(value).__name__, [dump(part, seen) for part in value]


def dumps(namespace: dict[str, Any]) -> list[Any]:
    seen: dict[int, int] = {}
    return [dump(namespace[name], seen) for name in NAMES]


@pytest.fixture
def sides():
    sides = Sides()
    yield sides
    sides.close()


@pytest.mark.parametrize("seed", [0, 1, 2, *map(nightly, range(3, 12))])
def test_objects_are_those_of_one_process(sides, seed):
    draw, plain = random.Random(seed), {}
    exec(SETUP, plain)
    exec(SETUP, sides.kernel)
    for n in range(12):
        chosen = draw.sample(STATEMENTS, 4)
        program, is_there = "\n".join([f"n = {n * 31 + seed}", *chosen]), draw.random() < 0.7
        exec(program, plain)
        if is_there:
            sides.ship(*NAMES, *("random", "np", "torch"))
            before = sides.snapshot(*NAMES, rebound=tuple(name for name in NAMES if f"\n{name} =" in program))
            exec(program, sides.worker)
            assert sides.bring_back(before).keys() <= {"__builtins__"}
        else:
            exec(program, sides.kernel)
        assert dumps(sides.kernel) == dumps(plain), (n, is_there, chosen)


@pytest.mark.parametrize(
    "change",
    [
        lambda records: records.reverse(),
        lambda records: records.append(["new"]),
        lambda records: records.popleft(),
    ],
)
def test_unchanged_items_are_not_sent(sides, change):
    sides.kernel["records"] = deque([[f"a text of some length {number}"] for number in range(300)])
    sides.ship("records")
    first = sides.kernel["records"][150]
    change(sides.kernel["records"])
    prepared = sides.ledger.serialize_changes(["records"], sides.kernel, SharedPayloads())
    delta, errors = NamespaceDelta.unpack(prepared.payload, sides.worker)
    prepared.payload.close()
    assert not errors
    assert not delta.items
    there = list(sides.worker["records"])
    assert sum(any(item is other for other in there) for item in delta.changed["records"][0]) >= 299
    assert not delta.apply(sides.worker)
    assert sides.worker["records"] == sides.kernel["records"]
    assert first in sides.worker["records"]


def test_another_number_of_items_is_refused(sides):
    sides.kernel["records"] = [[number] for number in range(200)]
    sides.ship("records")
    sides.worker["records"].pop()
    sides.kernel["records"].reverse()
    prepared = sides.ledger.serialize_changes(["records"], sides.kernel, SharedPayloads())
    _, errors = NamespaceDelta.unpack(prepared.payload, sides.worker)
    prepared.payload.close()
    assert "199 changeable items in place of 200" in str(errors["records"])


def test_workers_that_may_have_another_order_are_sent_all_items(sides):
    sides.kernel["records"] = [[number] for number in range(200)]
    sides.ship("records")
    sides.ledger.record_rank_dependent()
    assert sides.ship("records") == []
    there = sides.worker["records"]
    there.reverse()
    sides.kernel["records"][3].append("new")
    sides.ship("records")
    assert there is sides.worker["records"]
    assert there == sides.kernel["records"]
