"""Reading the samples of a batch in this process: always the batch that a plain loader gives."""

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Subset, TensorDataset

from accel_nb.data.fetch import build_reader

DTYPES = [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64]


class Pairs(Dataset):
    def __getitem__(self, index):
        return index, {"half": index / 2}

    def __len__(self):
        return 9


class Many(Pairs):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Shifted(TensorDataset):
    def __getitem__(self, index):
        return tuple(tensor + 1 for tensor in super().__getitem__(index))


def tensors(*shape):
    return [torch.randn(9, *shape).mul(5).to(dtype) for dtype in DTYPES]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and (one.dtype, one.stride()) == (other.dtype, other.stride())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


DATASETS = {
    "rows": lambda: TensorDataset(*tensors(3)),
    "scalars": lambda: TensorDataset(*tensors()),
    "images": lambda: TensorDataset(*tensors(2, 3, 4)),
    "one tensor": lambda: TensorDataset(torch.arange(9)),
    "transposed": lambda: TensorDataset(torch.randn(4, 9).T, torch.randn(3, 9, 2).transpose(0, 1)),
    "subset": lambda: Subset(TensorDataset(*tensors(3)), [8, 1, 1, 5]),
    "subset by tensor": lambda: Subset(TensorDataset(*tensors(3)), torch.tensor([8, 1, 1, 5])),
    "subset of a subset": lambda: Subset(Subset(TensorDataset(*tensors(3)), [8, 1, 1, 5]), [3, 0, 1]),
    "a class of its own": lambda: Shifted(torch.randn(9, 2)),
    "needs gradients": lambda: TensorDataset(torch.randn(9, 2, requires_grad=True)),
    "pairs": Pairs,
    "many": Many,
    "list": lambda: [[k, str(k)] for k in range(9)],
    "tensor": lambda: torch.randn(9, 3),
}


@pytest.mark.parametrize("name", DATASETS)
def test_a_batch_is_what_a_plain_loader_gives(name):
    dataset = DATASETS[name]()
    loader = DataLoader(dataset, batch_size=3)
    read = build_reader(loader)

    for batch, indices in zip(loader, loader.batch_sampler, strict=True):
        assert same(read(indices), batch)
        if name == "needs gradients":
            assert read(indices)[0].requires_grad


def test_a_batch_never_shares_memory_with_the_dataset():
    data = TensorDataset(torch.zeros(6))
    (batch,) = build_reader(DataLoader(data, batch_size=6))(list(range(6)))
    batch += 1

    assert data.tensors[0].sum() == 0


@pytest.mark.parametrize(
    "indices", [[-1, 2], [np.int64(3), 1], [torch.tensor(2)], (1, 2), [[1, 2]], [slice(0, 2)], [True], [None]]
)
def test_unusual_indices_mean_what_they_mean_to_the_dataset(indices):
    loader = DataLoader(TensorDataset(torch.arange(12).reshape(6, 2)), batch_sampler=[indices])

    assert same(build_reader(loader)(indices), next(iter(loader)))


@pytest.mark.parametrize("indices", [[9], [-10], [1.5]])
def test_indices_that_the_dataset_has_not_are_its_error(indices):
    loader = DataLoader(TensorDataset(torch.arange(6)), batch_sampler=[indices])

    with pytest.raises(Exception) as plain:  # noqa: PT011
        next(iter(loader))
    with pytest.raises(plain.type):
        build_reader(loader)(indices)


def test_a_sampler_of_batches_and_a_collate_function_of_ones_own():
    by_batch = DataLoader(torch.arange(9), batch_size=None, sampler=BatchSampler(range(9), 4, False))
    own = DataLoader(TensorDataset(torch.arange(9)), batch_size=2, collate_fn=len)

    assert build_reader(by_batch)([2, 5]).tolist() == [2, 5]
    assert build_reader(own)([2, 5, 6]) == 3
