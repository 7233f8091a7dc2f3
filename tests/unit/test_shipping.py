"""Shipping between two namespaces in one process: what a cell's names become on the other side."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

from accel_nb.errors import ShippingError
from accel_nb.pool.arena import COPY_BELOW, Parcel
from accel_nb.pool.returning import Receiver, Returner, Snapshot
from accel_nb.pool.shipping import Delivery, Ledger


class Sides:
    """A kernel's namespace and a worker's, and everything between them."""

    def __init__(self) -> None:
        self.kernel: dict = {}
        self.worker: dict = {}
        self.ledger, self.receiver, self.returner = Ledger(), Receiver(), Returner()

    def ship(self, *names: str, gone: tuple[str, ...] = ()) -> list[str]:
        """Send names and return those that were really sent."""
        prepared = self.ledger.prepare(names, self.kernel, gone=gone)
        if prepared.parcel is not None:
            self.ledger.record(prepared.sent, self.kernel)
            Delivery.unpack(prepared.parcel, self.worker).apply(self.worker)
            prepared.parcel.close()
        return prepared.sent

    def snapshot(self, *used: str, rebound: tuple[str, ...] = ()) -> Snapshot:
        return Snapshot.take(self.worker, used, shared=self.ledger.names(self.kernel), rebound=rebound)

    def bring_back(self, before: Snapshot, **options) -> dict[str, str]:
        """Return what the worker changed, and give the names that stayed there with the reasons."""
        parcels = self.returner.collect(self.worker, before, hidden=lambda name, value: False, **options)
        names = self.receiver.receive(parcels.body, parcels.descriptors, self.kernel)
        self.ledger.record(names, self.kernel)
        return parcels.body["kept"]

    def close(self) -> None:
        self.returner.close()
        self.receiver.close()
        self.kernel.clear()
        self.worker.clear()
        self.ledger.forget()


@pytest.fixture
def sides():
    sides = Sides()
    yield sides
    sides.close()


def test_unchanged_names_are_not_sent_again(sides):
    sides.kernel = {"numbers": [1, 2], "array": np.arange(4), "tensor": torch.arange(3), "model": nn.Linear(2, 2)}
    names = tuple(sides.kernel)
    assert sides.ship(*names) == list(names)
    assert sides.ship(*names) == []
    sides.kernel["numbers"].append(3)
    sides.kernel["array"][0] = 9
    sides.kernel["tensor"].add_(1)
    assert sides.ship(*names) == ["numbers", "array", "tensor"]
    assert sides.worker["numbers"] == [1, 2, 3]
    assert sides.worker["array"].tolist() == [9, 1, 2, 3]


def test_a_name_that_is_deleted_here_is_taken_away_there(sides):
    sides.kernel = {"model": nn.Linear(2, 2), "numbers": [1]}
    sides.kernel["optimizer"] = torch.optim.SGD(sides.kernel["model"].parameters(), lr=0.1)
    sides.ship(*sides.kernel)
    del sides.kernel["model"]
    assert sides.ship("numbers", gone=("model",)) == []
    assert sides.worker.keys() == {"numbers", "optimizer"}
    assert sides.ledger.names(sides.kernel) == ["numbers", "optimizer"]
    assert sides.ship("optimizer") == []


def test_changed_weights_are_copied_into_the_model_that_is_there(sides):
    sides.kernel["model"] = nn.Linear(2, 2)
    sides.ship("model")
    there = sides.worker["model"]
    with torch.no_grad():
        sides.kernel["model"].weight.fill_(5)
    sides.kernel["model"].bias.requires_grad_(False)
    sides.kernel["model"].eval()
    assert sides.ship("model") == ["model"]
    assert sides.worker["model"] is there
    assert there.weight.unique().item() == 5
    assert not there.bias.requires_grad
    assert not there.training


def test_an_optimizer_steps_the_model_that_is_there(sides):
    sides.kernel["model"] = nn.Linear(2, 2)
    sides.ship("model")
    sides.kernel["optimizer"] = torch.optim.Adam(sides.kernel["model"].parameters())
    sides.ship("model", "optimizer")
    assert sides.worker["optimizer"].param_groups[0]["params"][0] is sides.worker["model"].weight


def test_a_changed_learning_rate_keeps_the_state_there(sides):
    model = nn.Linear(2, 2)
    sides.kernel.update(model=model, optimizer=torch.optim.Adam(model.parameters()))
    sides.ship("model", "optimizer")
    there = sides.worker["optimizer"]
    sides.worker["model"](torch.ones(1, 2)).sum().backward()
    there.step()
    sides.kernel["optimizer"].param_groups[0]["lr"] = 0.5
    assert sides.ship("model", "optimizer") == ["optimizer"]
    assert sides.worker["optimizer"] is there
    assert there.param_groups[0]["lr"] == 0.5
    assert len(there.state) == 2


def test_training_comes_back_in_place(sides):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sides.kernel.update(model=model, optimizer=optimizer, scheduler=scheduler, losses=[])
    weight, losses = model.weight, sides.kernel["losses"]
    sides.ship("model", "optimizer", "scheduler", "losses")
    before = sides.snapshot("model", "optimizer", "scheduler", "losses")
    for _ in range(2):
        loss = sides.worker["model"](torch.ones(1, 2)).sum()
        loss.backward()
        sides.worker["optimizer"].step()
        sides.worker["scheduler"].step()
        sides.worker["losses"].append(loss.item())
    sides.worker["loss"] = loss
    assert sides.bring_back(before) == {}
    assert sides.kernel["model"] is model
    assert model.weight is weight
    assert torch.equal(weight, sides.worker["model"].weight)
    assert sides.kernel["losses"] is losses
    assert len(losses) == 2
    assert scheduler.last_epoch == 2
    assert len(optimizer.state) == 2
    assert sides.kernel["loss"].item() == loss.item()
    assert sides.ship("model", "optimizer", "scheduler", "losses", "loss") == []


def test_what_is_made_there_refers_to_what_is_here(sides):
    sides.kernel["model"] = nn.Linear(2, 2)
    sides.ship("model")
    before = sides.snapshot("model")
    sides.worker["alias"] = sides.worker["model"]
    sides.worker["optimizer"] = torch.optim.SGD(sides.worker["model"].parameters(), lr=0.1)
    sides.bring_back(before)
    assert sides.kernel["alias"] is sides.kernel["model"]
    assert sides.kernel["optimizer"].param_groups[0]["params"][0] is sides.kernel["model"].weight


def test_equal_numbers_are_not_taken_for_one_object(sides):
    sides.kernel.update(one=1, pair=(1, 2))
    sides.ship("one", "pair")
    sides.worker["one"] = 99
    sides.kernel["fresh"] = [1, (1, 2)]
    sides.ship("one", "pair", "fresh")
    assert sides.worker["fresh"] == [1, (1, 2)]


def test_large_values_stay_unless_wanted(sides):
    before = sides.snapshot()
    sides.worker["big"] = np.zeros(20_000_000)
    assert sides.bring_back(before) == {"big": "160 MB is large"}
    assert "big" not in sides.kernel
    assert sides.bring_back(sides.snapshot(), wanted=["big"]) == {}
    assert sides.kernel["big"].nbytes == 160_000_000


def test_shared_memory_of_tensors_survives(sides):
    base = torch.arange(10.0)
    model = nn.Linear(3, 3)
    tied = nn.ModuleDict({"a": model, "b": nn.Linear(3, 3)})
    tied["b"].weight = model.weight
    sides.kernel.update(base=base, view=base[2:9], tied=tied, half=torch.ones(3, dtype=torch.bfloat16))
    sides.ship("base", "view", "tied", "half")
    sides.worker["base"][4] = 100
    assert sides.worker["view"][2] == 100
    assert sides.worker["tied"]["a"].weight is sides.worker["tied"]["b"].weight
    assert sides.worker["half"].dtype == torch.bfloat16


def test_a_small_window_does_not_drag_its_storage_along(sides):
    sides.kernel["window"] = torch.zeros(1_000_000)[:10]
    parcel = sides.ledger.prepare(["window"], sides.kernel).parcel
    assert sum(size for _, size in parcel.buffers) == 40
    parcel.close()


def test_every_name_that_cannot_be_sent_is_told(sides):
    sides.kernel.update(lock=threading.Lock(), fine=1, numbers=(n for n in range(3)))
    with pytest.raises(ShippingError) as caught:
        sides.ship("lock", "fine", "numbers")
    assert "`lock` (_thread.lock) cannot be sent" in str(caught.value)
    assert "`numbers` (builtins.generator) cannot be sent" in str(caught.value)
    assert "fine" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 100, COPY_BELOW * 2])
def test_parcels_give_private_writable_buffers(size):
    parcel = Parcel.write(b"stream", [memoryview(bytearray(b"a" * size))])
    stream, [first] = parcel.read()
    _, [second] = parcel.read()
    assert bytes(stream) == b"stream"
    if size:
        first[0] = 98
        assert second[0] == 97
    parcel.close()


@pytest.mark.parametrize("table", [(10**9, []), (1, [(-1, 5)]), (1, [(0, 10**9)])])
def test_tables_that_do_not_fit_are_refused(table):
    parcel = Parcel.write(b"stream", [])
    with pytest.raises(ValueError, match="does not fit"):
        Parcel.from_table(parcel.descriptor, {"stream_bytes": table[0], "buffers": table[1]})
    parcel.close()


def test_functions_share_the_receiving_namespace():
    names = sys.modules["__main__"].__dict__
    names["_accel_nb_rate"] = 1
    code = compile("def read(): return _accel_nb_rate", "<cell>", "exec")
    import types

    function = types.FunctionType(code.co_consts[0], names, "read")
    function.__module__ = "__main__"
    names["read"] = function
    ledger = Ledger()
    parcel = ledger.prepare(["read"], names).parcel
    arrived: dict = {}
    Delivery.unpack(parcel, arrived).apply(arrived)
    parcel.close()
    names["_accel_nb_rate"] = 5
    assert arrived["read"]() == 5
    del names["read"], names["_accel_nb_rate"]


def test_functions_of_one_closure_share_their_variables_there_too(sides):
    names = {"__name__": "__main__"}
    code = (
        "def make():\n    count = 0\n    def add():\n        nonlocal count\n        count += 1\n        return add\n"
    )
    exec(code + "        return add\n    def read():\n        return count\n    return add, read\n", names)
    add, read = names["make"]()
    sides.kernel.update(add=add, read=read)
    sides.ship("add")
    sides.ship("read")
    assert sides.worker["add"]() is sides.worker["add"]
    assert sides.worker["read"]() == 1
