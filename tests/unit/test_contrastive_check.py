"""Losses that compare the samples of a batch with each other are distinguished from those that do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accel_nb.accelerator.plain_cells.loss_proof.contrastive_check import num_compared_rows

encode = nn.Linear(10, 8)
x, y = torch.randn(8, 10), torch.randn(8, 10)
own = torch.arange(8)


def two_towers() -> Tensor:
    logits = F.normalize(encode(x)) @ F.normalize(encode(y)).T / 0.1
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def two_views() -> Tensor:
    views = F.normalize(torch.cat([encode(x), encode(y)]))
    logits = (views @ views.T).masked_fill(torch.eye(16, dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, torch.arange(16).roll(8))


def einsum() -> Tensor:
    return F.cross_entropy(torch.einsum("nd,md->nm", encode(x), encode(y)), own)


def distances() -> Tensor:
    return torch.cdist(encode(x), encode(y)).max(1).values.mean()


@pytest.mark.parametrize(("loss", "rows"), [(two_towers, 8), (two_views, 16), (einsum, 8), (distances, 8)])
def test_a_product_of_all_samples_with_all_is_found(loss, rows):
    assert num_compared_rows(loss(), 8) == rows


def square_layers() -> Tensor:
    layers = nn.Sequential(nn.Linear(10, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    return F.cross_entropy(layers(x), own)


def square_layers_in_bf16() -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return square_layers()


def attention() -> Tensor:
    return nn.TransformerEncoderLayer(8, 2, batch_first=True)(torch.randn(8, 8, 8)).pow(2).mean()


def constant() -> Tensor:
    return (encode(x) @ torch.randn(8, 8)).mean()


@pytest.mark.parametrize("loss", [square_layers, square_layers_in_bf16, attention, constant])
def test_a_product_with_weights_or_within_a_sample_is_none(loss):
    assert num_compared_rows(loss(), 8) is None


def test_one_sample_has_none_to_be_compared_with():
    assert num_compared_rows(two_towers(), 1) is None
