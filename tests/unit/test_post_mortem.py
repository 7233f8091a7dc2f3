"""Who holds memory, and what is said about it, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accel_nb.accelerator.memory.post_mortem import release_error_memory, report_out_of_memory, requested_bytes
from accel_nb.config import resolve
from accel_nb.notebook.messages import RankAnswer, TaskReply
from accel_nb.notebook.session.post_mortem import describe_out_of_memory
from accel_nb.pool.engine import WorkerSpec
from accel_nb.telemetry.memory_attribution import MemoryAttribution, repeated_module_path
from accel_nb.telemetry.out_of_memory import MemoryHolder, OutOfMemoryReport

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.1 GiB"


class Layer(nn.Module):
    """Raises an out-of-memory error if ``fails``."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.fails = fails

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError(CUDA)
        return torch.relu(self.inner(x))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (CUDA, int(2.5 * 2**30)),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("Unable to allocate 8.00 GiB for an array with shape (1073741824,) and data type float64", 2**33),
        ("", None),
    ],
)
def test_what_was_asked_for(text: str, size: int | None) -> None:
    assert requested_bytes(text) == size


def test_storages_are_counted_once_and_by_what_they_are_for() -> None:
    model = nn.Sequential(Layer(), Layer())
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(32, 64)
    model(x).sum().backward()
    optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    held = MemoryAttribution("cpu")
    held.add_trained([model, model], [optimizer])
    assert held.bytes_by_kind["parameters"] == held.bytes_by_kind["gradients"] == weights
    assert held.bytes_by_kind["optimizer"] == 2 * weights + 4 * 4, "two moments, and a count for each parameter"
    assert held.bytes_by_module == {"*.inner": 4 * weights + 16}
    losses = [model(x).sum() for _ in range(3)]
    held.add_variables({"x": x, "view": x[1:], "losses": losses, "model": model})
    assert held.bytes_by_variable["x"] == x.nbytes
    assert held.bytes_by_variable["view"] == 0
    assert held.bytes_by_variable["losses"] >= 3 * 2 * x.nbytes, "two layers, each keeps what its relu gave"
    assert not held.activation_bytes_by_module
    out = model(x)
    held.add_variables({"out": out})
    assert set(held.activation_bytes_by_module) == {"*.inner"}


def test_what_is_to_be_computed_again_is_not_computed_for_a_count() -> None:
    calls: list[int] = []
    layer = Layer()

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return layer(x)

    out = checkpoint(counted, torch.randn(32, 64, requires_grad=True), use_reentrant=False)
    MemoryAttribution("cpu").add_variables({"out": out})
    assert calls == [1]


def test_names_of_blocks_are_joined() -> None:
    assert repeated_module_path("blocks.11.mlp.fc1") == "blocks.*.mlp.fc1"


def test_the_report_has_module_and_line_and_frames_are_released() -> None:
    model = nn.Sequential(Layer(), Layer(fails=True))
    names = {"model": model, "x": torch.randn(32, 64)}
    names["loss"] = names["model"][0](names["x"]).sum()
    try:
        model(names["x"])
        pytest.fail("it does not fit")
    except torch.OutOfMemoryError as error:
        found = report_out_of_memory(error, [], names, device="cpu", source="x = 1\nloss = 2")
        assert found is not None
        release_error_memory(error, names, ["loss"])
    assert found.requested == int(2.5 * 2**30)
    assert found.module == "1 (Layer)"
    assert "torch.OutOfMemoryError(CUDA)" in found.line
    assert MemoryHolder("`loss (line 2)`", 4) in found.holders
    assert MemoryHolder("activations saved for the backward pass in or after *.inner", 32 * 64 * 4) in found.holders
    assert names["loss"].grad_fn is None, "its graph would hold what the next step needs"


def test_other_errors_are_none_of_this() -> None:
    assert report_out_of_memory(ValueError("memory"), [], {}, device="cpu", source="") is None


def answer_of_rank_1(usable: int = 3 * 2**20) -> RankAnswer:
    found = OutOfMemoryReport(
        device="cpu", requested=2**20, free=2**19, bytes_by_kind={"parameters": 2**20}, unattributed=0, cached=0,
        usable=usable, line="line 3: model(x)", module="", holders=(MemoryHolder("`x (line 1)`", 2**20),),
    )  # fmt: skip
    return RankAnswer(1, "raised", TaskReply(memory=found))


@pytest.mark.nightly
def test_three_changes_are_weighed_where_the_model_is_known() -> None:
    model = nn.Sequential(*[Layer() for _ in range(20)])
    data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randn(512, 64))
    names = {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "loader": torch.utils.data.DataLoader(data, batch_size=512),
    }
    config, specs = resolve([]).config, [WorkerSpec("cpu", 1)] * 2
    lines = describe_out_of_memory([answer_of_rank_1()], names, config, specs)
    assert lines[1] == "Memory of rank 1 (cpu): 1.00 MiB were requested, 512 KiB were free"
    changes = [line for line in lines if " fits " in line or " lacks " in line]
    assert len(changes) == 3
    assert "batch_size=" in changes[0]
    assert "--strategy fsdp" in changes[1]
    assert "--activation-checkpointing" in changes[2]
    plenty = describe_out_of_memory([answer_of_rank_1(usable=2**30)], names, config, specs)
    assert sum(" fits " in line for line in plenty) == 3


def test_without_a_model_it_says_so() -> None:
    lines = describe_out_of_memory(
        [answer_of_rank_1(), answer_of_rank_1()], {}, resolve([]).config, [WorkerSpec("cpu", 1)] * 2
    )
    assert "what would fit is not known" in lines[-1]
    assert describe_out_of_memory([RankAnswer(0, "raised")], {}, resolve([]).config, []) == []
