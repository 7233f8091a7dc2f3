"""The last collective that a rank has entered, from torch's flight recorder and the exchange through shared memory."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from accel_nb.runtime.distributed.memory_exchange import MemoryExchange

_DEFAULT_GROUP_DESCRIPTION = "default_pg"
"""torch's description of the default group."""


@dataclass(frozen=True, slots=True)
class EnteredCollective:
    """A collective that a rank has entered."""

    group: str
    channel: str
    """The key in ``entered`` of the collective's count: its group, or the exchange through shared memory."""
    sequence: int
    """Its number among the collectives of its group.

    In the group of all ranks, exchanges through shared memory count too.
    """
    operation: str
    sizes: list[Any]
    is_open: bool
    """Whether the collective has not finished and belongs to the current group."""
    includes_all_ranks: bool
    """Whether all ranks are in its group."""
    entered: dict[str, int]
    """The number of collectives that the rank has entered, by group.

    The exchange through shared memory counts as a group.
    """


def find_last_collective(first: int, default_group: str, exchange: MemoryExchange | None) -> EnteredCollective | None:
    """Return the last collective that this rank has entered; None if there is no record of one.

    ``first`` is the number of the first record that can belong to the open group, ``default_group`` its name.
    """
    records = [record for record in _flight_records() if record["record_id"] >= first]
    last = max(records, key=_record_id, default=None)
    entered: dict[str, int] = {}
    for record in records:
        name = record["process_group"][0]
        entered[name] = max(entered.get(name, 0), record["collective_seq_id"])
    memory = f"{default_group} in memory"
    if exchange is not None:
        entered[memory] = exchange.num_exchanges
        if exchange.last.is_open or last is None or last["time_created_ns"] < exchange.last.began_ns:
            return EnteredCollective(
                group=default_group,
                channel=memory,
                sequence=entered.get(default_group, 0) + exchange.num_exchanges,
                operation=exchange.last.operation,
                sizes=exchange.last.sizes,
                is_open=exchange.last.is_open,
                includes_all_ranks=True,
                entered=entered,
            )
    if last is None:
        return None
    name, description = last["process_group"]
    includes_all_ranks = description == _DEFAULT_GROUP_DESCRIPTION
    return EnteredCollective(
        group=name,
        channel=name,
        sequence=last["collective_seq_id"] + (entered.get(memory, 0) if includes_all_ranks else 0),
        operation=last["profiling_name"].partition(":")[2] or last["profiling_name"],
        sizes=last["input_sizes"],
        is_open=last.get("retired") is False,
        includes_all_ranks=includes_all_ranks,
        entered=entered,
    )


def has_open_collectives(first: int) -> bool:
    """Return whether a collective of this rank with a record from number ``first`` on has not finished."""
    return any(record["record_id"] >= first and record.get("retired") is False for record in _flight_records())


def next_record_id() -> int:
    """Return the number of the next record of torch's flight recorder."""
    return max(map(_record_id, _flight_records()), default=-1) + 1


def _flight_records() -> list[dict[str, Any]]:
    """Return the entries of torch's flight recorder."""
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    return [] if dump is None else json.loads(dump(True, False)).get("entries") or []


def _record_id(record: dict[str, Any]) -> int:
    return int(record["record_id"])
