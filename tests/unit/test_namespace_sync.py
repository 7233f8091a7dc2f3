"""Shipping between two namespaces in one process: what a cell's names become on the other side."""

from __future__ import annotations

import functools
import resource
import sqlite3
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from accel_nb.errors import ShippingError
from accel_nb.pool.local.shared_payloads import COPY_BELOW, SharedBuffers, SharedPayloads
from accel_nb.pool.sync.change_detection import fingerprint_of
from accel_nb.pool.sync.namespace_sync import NamespaceDelta
from accel_nb.pool.sync.objects.shared_ids import SharedObjects
from accel_nb.pool.sync.shared_object_registry import SharedObjectRegistry
from tests.support.namespace_sides import Sides


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
    assert sides.ship("numbers") == []
    assert sides.worker.keys() == {"numbers", "optimizer"}
    assert sides.ledger.shared_names(sides.kernel) == ["numbers", "optimizer"]
    assert sides.ship("optimizer") == []


def test_a_deleted_name_is_taken_away_with_the_next_cell_if_this_one_is_not_sent(sides):
    sides.kernel = {"old": [0], "numbers": [1]}
    sides.ship(*sides.kernel)
    del sides.kernel["old"]
    unsent = sides.ledger.serialize_changes(["numbers"], sides.kernel, SharedPayloads())
    assert unsent.removed_names == ("old",)
    unsent.payload.close()
    sides.ship("numbers")
    assert sides.worker.keys() == {"numbers"}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64, torch.int8])
def test_weights_that_came_back_are_sent_again_only_after_a_change_here(sides, dtype):
    sides.kernel["model"] = nn.BatchNorm2d(3)
    sides.kernel["model"].register_buffer("extra", torch.zeros(5, 3, dtype=dtype))
    sides.ship("model")
    before = sides.snapshot("model")
    with torch.no_grad():
        for number, tensor in enumerate((*sides.worker["model"].parameters(), *sides.worker["model"].buffers())):
            tensor.add_(number + 1)
    sides.bring_back(before)
    assert sides.kernel["model"].extra[4, 2] == sides.worker["model"].extra[4, 2] != 0
    assert sides.ship("model") == []
    sides.kernel["model"].extra.view(-1).view(torch.uint8)[-1] ^= 1
    assert sides.ship("model") == ["model"]
    assert torch.equal(sides.kernel["model"].extra, sides.worker["model"].extra)


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


def test_large_gradients_stay_unless_wanted(sides, monkeypatch):
    monkeypatch.setattr("accel_nb.pool.sync.result_collection.LARGE_BYTES", 64)
    sides.kernel["model"], sides.kernel["small"] = torch.nn.Linear(8, 4), torch.nn.Linear(2, 1)
    sides.ship("model", "small")
    before = sides.snapshot("model", "small")
    sides.worker["new"] = torch.nn.Linear(8, 4)
    for name, size in (("model", 8), ("small", 2), ("new", 8)):
        sides.worker[name](torch.ones(3, size)).sum().backward()
    assert sides.bring_back(before) == {"model.grad": "144 B is large", "new.grad": "144 B is large"}
    assert sides.kernel["model"].weight.grad is None
    assert sides.kernel["new"].weight.grad is None
    assert torch.equal(sides.kernel["small"].weight.grad, torch.full((1, 2), 3.0))

    sides.bring_back(sides.snapshot(), wanted=["model"])
    assert torch.equal(sides.kernel["model"].weight.grad, sides.worker["model"].weight.grad)


def test_gradients_that_are_not_of_one_process_stay(sides):
    sides.kernel["model"] = torch.nn.Linear(2, 1)
    sides.ship("model")
    before = sides.snapshot("model")
    sides.worker["new"] = torch.nn.Linear(2, 1)
    sides.worker["other"] = torch.nn.Linear(2, 1)
    for name in ("model", "new", "other"):
        sides.worker[name](torch.ones(3, 2)).sum().backward()
    partial = {id(value) for name in ("model", "new") for value in sides.worker[name].parameters()}
    assert sides.bring_back(before, partial_gradients=partial) == {}
    assert sides.kernel["model"].weight.grad is None
    assert sides.kernel["new"].weight.grad is None
    assert sides.kernel["other"].weight.grad is not None


def test_sparse_gradients_come_back(sides):
    sides.kernel["table"] = torch.nn.Embedding(4, 2, sparse=True)
    sides.ship("table")
    before = sides.snapshot("table")
    sides.worker["table"](torch.tensor([1, 1])).sum().backward()
    assert sides.bring_back(before) == {}
    assert torch.equal(sides.kernel["table"].weight.grad.to_dense(), sides.worker["table"].weight.grad.to_dense())
    assert sides.ship("table") == []


def test_handles_of_hooks_whose_module_is_gone_are_sent(sides):
    handle = nn.Linear(1, 1).register_forward_hook(lambda *values: None)
    sides.kernel["handles"] = [handle]
    assert sides.ship("handles") == ["handles"]
    sides.worker["handles"][0].remove()


def test_a_handle_whose_module_is_gone_there_stays_that_of_the_module_here(sides):
    model = nn.Linear(1, 1)
    handle = model.register_forward_hook(lambda *values: None)
    holder = types.SimpleNamespace(handle=handle)
    sides.kernel.update(model=model, holder=holder)
    sides.ship("model", "holder")
    before = sides.snapshot("model", "holder", rebound=("model",))
    sides.worker["model"] = nn.Linear(2, 1)
    sides.worker["holder"].handle = sides.worker["model"].register_forward_hook(lambda *values: None)
    assert not sides.bring_back(before)
    handle.remove()
    assert not model._forward_hooks
    holder.handle.remove()
    assert not sides.kernel["model"]._forward_hooks


def test_large_values_stay_unless_wanted(sides):
    before = sides.snapshot()
    sides.worker["big"] = np.zeros(20_000_000)
    assert sides.bring_back(before) == {"big": "153 MiB is large"}
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
    payload = sides.ledger.serialize_changes(["window"], sides.kernel, SharedPayloads()).payload
    assert sum(size for _, size in payload.buffers) == 40
    payload.close()


def test_every_name_that_cannot_be_sent_is_reported(sides):
    sides.kernel.update(own=threading.local(), fine=1, numbers=(n for n in range(3)))
    next(sides.kernel["numbers"])
    with pytest.raises(ShippingError) as caught:
        sides.ship("own", "fine", "numbers")
    assert "`own` (_thread._local) cannot be sent" in str(caught.value)
    assert "`numbers` (builtins.generator) cannot be sent" in str(caught.value)
    assert "fine" not in str(caught.value)


def test_a_file_on_a_full_disk_is_named_with_the_error(sides, tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path / "log", "w") as file:
        file.write("unsaved")
        sides.kernel["file"] = file
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
        try:
            with pytest.raises(ShippingError, match=r"`file` .* cannot be sent .*File too large"):
                sides.ship("file")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_hook_gets_no_number_that_one_of_the_other_side_has(sides):
    numbers = torch.utils.hooks.RemovableHandle
    sides.kernel["model"] = nn.Linear(2, 2)
    for _ in range(3):
        sides.kernel["model"].register_forward_hook(noop)
    prepared = sides.ledger.serialize_changes(["model"], sides.kernel, SharedPayloads())
    last, numbers.next_id = numbers.next_id, 0  # as in another process
    try:
        delta, _ = NamespaceDelta.unpack(prepared.payload, sides.worker)
        assert numbers.next_id >= last
    finally:
        numbers.next_id = last
        prepared.payload.close()
    delta.apply(sides.worker)
    sides.worker["model"].register_forward_hook(noop)
    assert len(sides.worker["model"]._forward_hooks) == 4


def noop(*_):
    pass


class ArrivesAsConnection:
    def __reduce__(self):
        return sqlite3.connect, (":memory:",)


def test_a_value_that_arrives_as_one_that_cannot_be_copied_comes_back_and_is_not_sent_again(sides):
    before = sides.snapshot()
    sides.worker.update(base=ArrivesAsConnection(), fine=1)
    assert sides.bring_back(before) == {}
    assert sides.kernel["fine"] == 1
    sides.kernel["base"].close()
    assert sides.ship("fine") == []
    with pytest.raises(ShippingError, match="`base`"):
        sides.ship("base")


@pytest.mark.parametrize("size", [0, 100, COPY_BELOW * 2])
def test_payloads_give_private_writable_buffers(size):
    payload = SharedBuffers.write(b"stream", [memoryview(bytearray(b"a" * size))])
    stream, [first] = payload.read()
    _, [second] = payload.read()
    assert bytes(stream) == b"stream"
    if size:
        first[0] = 98
        assert second[0] == 97
    payload.close()


@pytest.mark.parametrize("table", [(10**9, []), (1, [(-1, 5)]), (1, [(0, 10**9)])])
def test_tables_that_do_not_fit_are_refused(table):
    payload = SharedBuffers.write(b"stream", [])
    with pytest.raises(ValueError, match="does not fit"):
        SharedBuffers.from_table(payload.descriptor, {"header_bytes": table[0], "buffers": table[1]})
    payload.close()


def _fail(*_: object) -> None:
    raise ImportError("it is made on one side only")


class Unbuildable:
    """Can be copied and not rebuilt; what it holds is rebuilt before it fails."""

    def __init__(self, *held: object) -> None:
        self.held = held

    def __reduce__(self):
        return _fail, self.held


class Holder:
    def __init__(self, held: list[int]) -> None:
        self.held = held


def test_a_value_that_cannot_be_rebuilt_costs_only_itself(sides):
    model = nn.Linear(2, 2)
    sides.kernel = {"model": model, "history": []}
    sides.ship("model", "history")
    before = sides.snapshot("model", "history", rebound=("odd", "fresh", "table", "same", "inner", "outer"))
    with torch.no_grad():
        sides.worker["model"].weight.fill_(7.0)
    sides.worker["history"].append(1)
    fresh, inner, array = nn.Linear(2, 2), nn.Linear(1, 1), np.arange(3)
    sides.worker |= {"odd": Unbuildable(array, inner), "fresh": fresh, "table": {"a": array}, "same": [array]}
    sides.worker["steps"] = torch.optim.SGD(fresh.parameters(), lr=0.5)
    sides.worker |= {"first": Unbuildable(unheld := [5]), "second": Holder(unheld), "third": Holder([6]), "number": 3}
    kept = sides.bring_back(before)
    reason = "cannot be rebuilt in the notebook: ImportError: it is made on one side only"
    assert kept["odd"] == kept["first"] == reason
    assert kept["second"].endswith("it shares an object with odd, first")
    assert sides.kernel["third"].held == [6]
    assert kept.keys() == {"odd", "first", "second"}
    assert sides.kernel["model"] is model
    assert model.weight.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert sides.kernel["history"] == [1]
    assert sides.kernel["table"]["a"] is sides.kernel["same"][0], "they share an object, and still do"
    assert sides.kernel["steps"].param_groups[0]["params"][0] is sides.kernel["fresh"].weight
    assert sides.kernel["number"] == 3


def test_what_cannot_be_applied_costs_only_itself(sides):
    class Stubborn(torch.optim.SGD):
        def load_state_dict(self, state_dict):
            raise ValueError("not today")

    model = nn.Linear(2, 2)
    optimizer = Stubborn(model.parameters(), lr=0.1, momentum=0.9)
    sides.kernel = {"model": model, "optimizer": optimizer, "rows": []}
    sides.ship(*sides.kernel)
    before = sides.snapshot(*sides.kernel)
    sides.worker["model"](torch.ones(1, 2)).sum().backward()
    sides.worker["optimizer"].step()
    sides.worker["rows"].append(4)
    del sides.kernel["rows"]
    kept = sides.bring_back(before)
    assert kept["optimizer"] == "cannot be rebuilt in the notebook: ValueError: not today"
    assert kept["rows"].startswith("cannot be rebuilt in the notebook: KeyError")
    assert torch.equal(model.weight, sides.worker["model"].weight)


def test_a_name_of_many_for_one_object_can_be_bound_anew(sides):
    nets = [nn.Linear(1, 1), nn.Linear(1, 1)]
    sides.kernel = {"net": nets[1], "nets": nets}
    sides.ship("net", "nets")
    there = sides.worker["nets"][1]
    sides.kernel["net"] = None
    assert sides.ship() == []
    assert "net" not in sides.worker
    assert sides.ship("nets") == []
    with torch.no_grad():
        nets[1].weight.fill_(4.0)
    assert sides.ship("nets") == ["nets@item:1"]
    assert sides.worker["nets"][1] is there
    assert there.weight.item() == 4.0


def test_an_object_that_has_another_name_now_is_the_same_object_there(sides):
    model = nn.Linear(2, 2)
    sides.kernel = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    sides.ship("model", "optimizer")
    there = sides.worker["model"]
    sides.kernel["best"] = sides.kernel.pop("model")
    sides.ship("optimizer")
    assert sides.worker.keys() == {"best", "optimizer"}
    assert sides.worker["best"] is there


def test_deleted_objects_are_freed_unless_something_uses_them(sides):
    sides.kernel.update(model=nn.Linear(2, 2), kept=nn.Linear(2, 2), values=np.ones(3), items=[nn.Linear(1, 1)])
    sides.ship(*sides.kernel)
    references = {name: weakref.ref(sides.kernel[name]) for name in ("model", "kept", "values")}
    there = sides.worker["kept"]
    sides.kernel["other"] = sides.kernel.pop("kept")
    sides.kernel.update(values=None)
    del sides.kernel["model"], sides.kernel["items"]
    assert all(reference() is not None for reference in references.values())
    sides.ledger.release_unused(sides.kernel)
    assert [name for name, reference in references.items() if reference() is not None] == ["kept"]
    assert sides.ship("values") == ["values", "other"]
    assert sides.worker.keys() == {"other", "values"}
    assert sides.worker["other"] is there


def test_functions_share_the_receiving_namespace():
    names = sys.modules["__main__"].__dict__
    names["_accel_nb_rate"] = 1
    code = compile("def read(): return _accel_nb_rate", "<cell>", "exec")
    import types

    function = types.FunctionType(code.co_consts[0], names, "read")
    function.__module__ = "__main__"
    names["read"] = function
    ledger = SharedObjectRegistry()
    payload = ledger.serialize_changes(["read"], names, SharedPayloads()).payload
    arrived: dict = {}
    NamespaceDelta.unpack(payload, arrived)[0].apply(arrived)
    payload.close()
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


class Slotted:
    __slots__ = ("count", "spare", "values")

    def __init__(self) -> None:
        self.count, self.values, self.spare = 0, [], "set"


class Mixed(Slotted):
    def __init__(self) -> None:
        super().__init__()
        self.more = {}


@pytest.mark.parametrize("kind", [Slotted, Mixed])
def test_attributes_in_slots_come_back_in_place(sides, kind):
    held = sides.kernel["held"] = kind()
    values = held.values
    sides.ship("held")
    before = sides.snapshot("held")
    worker = sides.worker["held"]
    worker.count += 1
    worker.values.append(2)
    del worker.spare
    if kind is Mixed:
        worker.more["a"] = 1
    assert sides.bring_back(before) == {}
    assert sides.kernel["held"] is held
    assert (held.count, held.values, hasattr(held, "spare")) == (1, [2], False)
    assert held.values is values
    if kind is Mixed:
        assert held.more == {"a": 1}


def test_a_method_of_a_list_changes_the_list_of_the_notebook(sides):
    losses, names = [], set()
    sides.kernel.update(losses=losses, record=losses.append, add=functools.partial(names.add, "a"))
    sides.ship("record", "add")
    before = sides.snapshot("record", "add")
    sides.worker["record"](0.5)
    sides.worker["add"]()
    assert sides.bring_back(before) == {}
    assert sides.kernel["losses"] is losses
    assert (losses, names) == ([0.5], {"a"})
    sides.kernel["record"](0.25)
    assert losses == [0.5, 0.25]


def test_a_view_of_what_both_sides_hold_is_sent_as_a_view(sides):
    model, table, rows = nn.Linear(2, 3), torch.zeros(4, 2), np.zeros((4, 2))
    sides.kernel = {"model": model, "table": table, "rows": rows}
    sides.ship(*sides.kernel)
    sides.kernel |= {"state": model.state_dict(), "row": table[2], "column": rows[:, 1], "tail": model.bias.data[1:]}
    assert sides.ship("state", "row", "column", "tail") == ["state", "row", "column", "tail"]
    held = sides.worker
    with torch.no_grad():
        held["model"].weight.fill_(5)
        held["tail"].fill_(6)
    held["table"].fill_(7)
    held["rows"][:] = 8
    assert held["state"]["weight"].eq(5).all()
    assert held["model"].bias[1:].tolist() == [6, 6]
    assert (held["row"].tolist(), held["column"].tolist()) == ([7, 7], [8] * 4)
    assert sides.ship("state", "row", "column", "tail") == []


def test_a_view_that_a_cell_makes_is_one_in_the_notebook(sides):
    model = nn.Linear(2, 3)
    sides.kernel = {"model": model}
    sides.ship("model")
    before = sides.snapshot("model")
    held = sides.worker["model"]
    sides.worker |= {"state": held.state_dict(), "array": held.bias.detach().numpy()[::-1]}
    held.weight.data.fill_(2)
    assert sides.bring_back(before) == {}
    assert sides.kernel["state"]["weight"].eq(2).all()
    sides.kernel["state"]["bias"].fill_(3)
    model.weight.data.fill_(4)
    assert sides.kernel["array"].tolist() == [3, 3, 3]
    assert sides.kernel["state"]["weight"].eq(4).all()


def test_a_tensor_that_is_a_view_no_more_comes_back_apart(sides):
    model = nn.Linear(2, 3)
    sides.kernel = {"model": model, "weight": model.weight.data}
    sides.ship("model", "weight")
    before = sides.snapshot("model", "weight")
    held = sides.worker["model"]
    held.weight.data = torch.full((3, 2), 5.0)
    assert sides.bring_back(before) == {}
    assert model.weight.eq(5).all()
    assert not sides.kernel["weight"].eq(5).any()


def test_views_of_weights_of_another_dtype_come_back_as_views(sides):
    model = nn.Linear(2, 3)
    sides.kernel = {"model": model}
    sides.ship("model")
    before = sides.snapshot("model")
    held = sides.worker["model"].double()
    sides.worker["state"] = held.state_dict()
    assert sides.bring_back(before) == {}
    model.weight.data.fill_(4)
    assert sides.kernel["state"]["weight"].dtype is torch.float64
    assert sides.kernel["state"]["weight"].eq(4).all()


def test_a_view_into_a_tensor_of_another_layout_is_refused(sides):
    sides.kernel = {"model": nn.Linear(2, 3)}
    sides.ship("model")
    before = sides.snapshot("model")
    sides.worker["row"] = sides.worker["model"].weight.data[1]
    sides.kernel["model"].weight.data = torch.zeros(2, 3).T
    assert "another layout" in sides.bring_back(before)["row"]


def test_a_view_whose_owner_was_moved_to_another_device_is_recognized():
    weight = nn.Parameter(torch.zeros(3, 2))
    view, ids = weight.data, {id(weight): ("parameter", "model", "weight")}
    before = fingerprint_of(view, {}, SharedObjects(ids, [weight]))
    now = SharedObjects(ids, [weight])
    assert not now.has_moved(before.kind, view)
    now.owners[id(weight)] = weight.to("meta")  # on a machine without a GPU no parameter can be moved in place
    assert now.has_moved(before.kind, view)
    assert not now.has_moved(fingerprint_of(torch.zeros(2), {}, now).kind, view)


def test_a_lock_is_sent_as_a_new_one_unless_a_thread_holds_it(sides):
    sides.kernel.update(free=threading.Lock(), nested=[threading.RLock()], finished=threading.Event())
    sides.ship("free", "nested", "finished")
    assert sides.worker["free"].acquire(blocking=False)
    assert sides.worker["nested"][0].acquire(blocking=False)
    assert not sides.worker["finished"].is_set()
    held = threading.Lock()
    sides.kernel["held"] = held
    with held, pytest.raises(ShippingError, match="a thread of this process holds the lock"):
        sides.ship("held")


def test_an_object_without_content_stays_one_where_the_list_around_it_changes(sides):
    missing = object()
    sides.kernel.update(items=[missing, 1], others=[missing])
    sides.ship("items", "others")
    assert sides.worker["items"][0] is sides.worker["others"][0]
    before = sides.snapshot("items")
    sides.worker["items"].append(2)
    assert not sides.bring_back(before)
    assert sides.kernel["items"] == [missing, 1, 2]
    sides.kernel["items"].append(3)
    assert sides.ship("items") == ["items"]
    assert sides.worker["items"][0] is sides.worker["others"][0]


def test_a_group_of_an_optimizer_has_the_keys_of_the_notebook_in_their_order(sides):
    sides.kernel["optimizer"] = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    sides.ship("optimizer")
    group = sides.kernel["optimizer"].param_groups[0]
    group["lr"] = group.pop("lr")
    group["note"] = "last"
    del group["nesterov"]
    sides.ship("optimizer")
    assert list(sides.worker["optimizer"].param_groups[0]) == list(group)
    assert group["params"][0].shape == sides.worker["optimizer"].param_groups[0]["params"][0].shape


def test_a_dict_of_an_object_with_another_attribute_stays_one_on_both_sides(sides):
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    sides.kernel["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sides.ship("scheduler")
    before = sides.snapshot("scheduler", rebound=("held",))
    sides.worker["held"] = {"scheduler": sides.worker["scheduler"]}
    sides.bring_back(before)
    optimizer.step()
    sides.kernel["scheduler"].step()  # it sets a new list of rates
    sides.ship("held")
    before = sides.snapshot("held", rebound=("items",))
    sides.worker["items"] = [sides.worker["held"]]
    sides.bring_back(before)
    assert sides.kernel["items"][0] is sides.kernel["held"]


def test_tensors_and_buffers_made_in_inference_mode_change_in_place_on_both_sides(sides):
    model = nn.BatchNorm1d(2)
    with torch.inference_mode():
        model.running_mean = torch.ones(2)
        sides.kernel.update(model=model, scores=[torch.zeros(2)])
    names = "model", "scores"
    assert sides.ship(*names) == list(names)
    assert sides.ship(*names) == []
    with torch.inference_mode():
        sides.kernel["scores"][0] += 1
        model.running_mean += 1
    assert sorted(sides.ship(*names)) == ["model", "scores@item:0"]
    assert sides.worker["scores"][0].tolist() == sides.worker["model"].running_mean.sub(1).tolist() == [1, 1]
    before = sides.snapshot(*names)
    with torch.inference_mode():
        sides.worker["scores"][0] += 1
        sides.worker["scores"].append(torch.zeros(1))
        sides.worker["model"].running_mean += 1
    scores, mean = sides.kernel["scores"][0], model.running_mean
    assert not sides.bring_back(before)
    assert sides.kernel["scores"] == [scores, torch.zeros(1)]
    assert scores.tolist() == mean.sub(1).tolist() == [2, 2]
