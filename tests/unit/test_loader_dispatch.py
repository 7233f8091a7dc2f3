"""Batches that rank 0 reads and sends to the other ranks."""

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
)

from accel_nb.config.sections import DataOptions
from accel_nb.errors import MisuseError
from tests.support.thread_ranks import (
    Counted,
    Setup,
    merged,
    run_threads,
)

DISPATCH = DataOptions(dispatch_batches=True)


def test_only_rank_0_reads_what_is_dispatched():
    def body(comm):
        data = Counted(22)
        setup = Setup(comm, batch="per-worker", options=DISPATCH)
        return setup.read(setup.shard(DataLoader(data, batch_size=4))), data.read

    (first, read), *others = run_threads(3, body)

    assert read == list(range(22))
    assert all(not read for _, read in others)
    per_rank = [first, *(seen for seen, _ in others)]
    assert merged(per_rank, 2) == [list(range(12)), list(range(12, 22))]
    assert first[-1][1].is_last


def test_streams_are_dispatched_where_each_workers_batch_is_meant_and_no_others():
    def body(comm):
        reads = []
        for batch, options in [
            ("per-worker", None),
            ("global", None),
            ("per-worker", DataOptions(dispatch_batches=False)),
        ]:
            data = Counted(8)
            setup = Setup(comm, batch=batch, options=options)
            setup.read(setup.shard(DataLoader(data, batch_size=4)))
            reads.append(len(data.read))
        return reads

    assert run_threads(2, body) == [[8, 8, 8], [0, 8, 8]]


def test_dispatched_batches_are_what_rank_0_read_of_any_type():
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]

    def batch(size):
        fields = {str(dtype): (torch.randn(size, 3, generator=generator) * 3).to(dtype) for dtype in dtypes}
        return {
            **fields,
            "empty": torch.zeros(size, 0),
            "pair": (np.arange(size) * 2, [f"n{k}" for k in range(size)]),
            "same": torch.tensor(4.5),
            "note": None,
            "transposed": torch.arange(size * 2).reshape(2, size).T,
        }

    whole = [batch(5), batch(5), batch(4)]

    def body(comm):
        setup = Setup(comm, options=DISPATCH)
        return list(setup.shard(DataLoader(whole, batch_size=None, collate_fn=lambda item: item)))

    first, second = run_threads(2, body)

    for number, original in enumerate(whole):
        parts = first[number], second[number]
        cut = 3 if number < 2 else 2
        for name in [*map(str, dtypes), "empty", "transposed"]:
            assert torch.equal(torch.cat([part[name] for part in parts]), original[name])
            assert parts[0][name].shape[0] == cut
            assert parts[1][name].dtype == original[name].dtype
        for part, rows in zip(parts, (slice(0, cut), slice(cut, None)), strict=True):
            array, names = part["pair"]
            assert isinstance(part["pair"], tuple)
            assert isinstance(array, np.ndarray)
            assert array.tolist() == original["pair"][0][rows].tolist()
            assert names == original["pair"][1][rows]
            assert part["note"] is None
            assert part["same"] == 4.5


def test_a_step_is_one_message_unless_a_share_outgrows_the_last_ones():
    def body(comm, sizes):
        setup = Setup(comm, options=DISPATCH)
        batches = [torch.arange(size) for size in sizes]
        seen = setup.read(setup.shard(DataLoader(batches, batch_size=None)))
        return [samples for samples, _ in seen]

    def calls(sizes):
        first, second = run_threads(2, lambda comm: body(comm, sizes))
        assert [a + b for a, b in zip(first, second, strict=True)] == [list(range(size)) for size in sizes]
        return run_threads.num_calls // 2

    # The table of ranks and the end come on top.
    assert calls([4] * 10) == 10 + 2
    assert calls([4, 6, 2, 9, 4]) == 5 + 2
    assert calls([4, 5000, 5000, 4, 4]) == 5 + 2 + 2


def test_an_error_of_what_rank_0_reads_is_raised_on_every_rank():
    class Broken(IterableDataset):
        def __iter__(self):
            yield torch.tensor(0)
            yield torch.tensor(1)
            raise KeyError("lost")

    def body(comm):
        setup = Setup(comm, options=DISPATCH)
        with pytest.raises((KeyError, MisuseError), match="lost") as raised:
            setup.read(setup.shard(DataLoader(Broken(), batch_size=2)))
        return raised.type, str(raised.value)

    (kind, _), (other, message) = run_threads(2, body)

    assert (kind, other) == (KeyError, MisuseError)
    assert "rank 0, which reads for all ranks (dispatch_batches), failed: KeyError" in message


@pytest.mark.parametrize("item", [object(), {1: 2}, {"x": {3}}, np.array(["x", object()])])
def test_what_cannot_be_sent_is_an_error_on_every_rank_that_says_what_can(item):
    def body(comm):
        setup = Setup(comm, options=DISPATCH)
        with pytest.raises(MisuseError, match=r"cannot be sent.*dispatch_batches to False") as raised:
            list(setup.shard(DataLoader([item], batch_size=None, collate_fn=lambda item: item)))
        return str(raised.value)

    messages = run_threads(2, body)

    assert all("numpy" in m or "object" in m or type(item).__name__ in m or "set" in m for m in messages)


def test_a_dispatched_epoch_left_early_can_be_started_again():
    def body(comm):
        setup = Setup(comm, batch="per-worker", options=DISPATCH)
        loader = setup.shard(DataLoader(Counted(16), batch_size=2))
        for _ in loader:
            break
        return setup.read(loader)

    per_rank = run_threads(2, body)

    assert [s for batch in merged(per_rank, 4) for s in batch] == list(range(16))
