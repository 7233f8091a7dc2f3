"""Generators and iterators of loaders between kernel and workers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch.utils.data import DataLoader

from accel_nb.errors import ShippingError
from accel_nb.pool.payload import MemoryPayloads
from accel_nb.pool.sync.shared_object_registry import SharedObjectRegistry
from accel_nb.pool.sync.stream.pickling import dump, load
from accel_nb.runtime.python_generators import argument_values


def _copied(value: Any) -> Any:
    return load(*dump(value, namespace={}, shared={}), namespace={})


def _numbers(first, *more, step=1, **named):
    yield from (first, *more, step, *named.values())


def test_a_generator_that_has_not_started_is_called_anew() -> None:
    assert list(_copied(_numbers(1, 2, 3, step=4, other=5))) == [1, 2, 3, 4, 5]


def test_a_generator_has_its_closure_and_a_generator_expression_its_iterator() -> None:
    offset = 10

    def shifted(values):
        for value in values:
            yield value + offset

    assert list(_copied(shifted([1, 2]))) == [11, 12]
    assert list(_copied(value * offset for value in [1, 2])) == [10, 20]


def test_a_generator_that_has_ended_yields_nothing() -> None:
    generator = _numbers(1)
    list(generator)
    assert list(_copied(generator)) == []


def test_a_generator_that_has_started_is_refused() -> None:
    generator = _numbers(1)
    next(generator)
    with pytest.raises(TypeError, match="has yielded values already"):
        _copied(generator)


def test_the_iterator_of_a_loader_is_copied_until_it_is_read() -> None:
    iterator = iter(DataLoader([1, 2, 3, 4], batch_size=2))  # type: ignore[arg-type]
    assert [batch.tolist() for batch in _copied(itertools.islice(iterator, 9))] == [[1, 2], [3, 4]]
    next(iterator)
    with pytest.raises(TypeError, match="has yielded values already"):
        _copied(iterator)


def test_the_parts_of_a_generator_are_its_arguments() -> None:
    def batches(source):
        made = []
        for item in source:
            made.append(item)
            yield made

    generator = batches(given := [[1], [2]])
    assert next(generator) == [[1]]
    assert argument_values(generator) == {"source": given}


def test_an_iterator_that_workers_have_read_from_is_not_sent_again() -> None:
    registry, namespace = SharedObjectRegistry(), {"values": _numbers(1)}

    def send() -> Any:
        return registry.serialize_changes(["values"], namespace, MemoryPayloads()).payload

    send()
    registry.record_sent(["values"], namespace)
    assert registry.record_read("values", namespace)
    assert send() is None
    registry.forget()
    with pytest.raises(ShippingError, match="workers have read from this generator"):
        send()
