"""The record of the values that a notebook's workers have, without workers."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

from accel_nb.config import resolve
from accel_nb.notebook.cells.cell_analysis import analyze_cell
from accel_nb.notebook.messages import RankAnswer
from accel_nb.notebook.session.namespace_session import NamespaceSession
from accel_nb.notebook.session.run_state import Cell, PackedCell
from accel_nb.pool.engine import EngineFacts
from accel_nb.pool.payload import MemoryPayloads

POOL: Any = SimpleNamespace(payloads=MemoryPayloads(), size=2)
FACTS = EngineFacts(True, 1, {}, {}, None, (), {})


def pack(session: NamespaceSession, source: str) -> PackedCell:
    tree = ast.parse(source)
    return session.pack_cell(Cell(source, tree, 1), analyze_cell(tree, session.namespace), resolve([]), POOL, FACTS)[0]


def test_values_of_a_cell_without_answers_are_sent_again():
    session = NamespaceSession({"x": [1], "y": [2]})
    session.record_answers(pack(session, "y"), [RankAnswer(rank, "done") for rank in range(2)])
    assert pack(session, "x, y").sent_paths == ["x"]
    packed = pack(session, "x, y")  # an interrupt has ended the last cell before its request
    assert packed.sent_paths == ["x"]
    assert packed.bodies[0]["settings"]
    session.record_answers(packed, [RankAnswer(rank, "done") for rank in range(2)])
    assert pack(session, "x, y").sent_paths == []
