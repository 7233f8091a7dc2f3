"""The record of the values that a notebook's workers have, without workers."""

from __future__ import annotations

import ast
import sys
from types import SimpleNamespace
from typing import Any

from accel_nb.config import resolve
from accel_nb.notebook.cells.cell_analysis import analyze_cell
from accel_nb.notebook.messages import RankAnswer, TaskReply
from accel_nb.notebook.session.namespace_session import NamespaceSession
from accel_nb.notebook.session.run_state import Cell, PackedCell
from accel_nb.pool.engine import EngineFacts
from accel_nb.pool.payload import MemoryPayloads

POOL: Any = SimpleNamespace(payloads=MemoryPayloads(), size=2)
FACTS = EngineFacts(True, 1, {}, {}, None, (), {})


def pack(session: NamespaceSession, source: str) -> PackedCell:
    tree = ast.parse(source)
    return session.pack_cell(Cell(source, tree, 1), analyze_cell(tree, session.namespace), resolve([]), POOL, FACTS)[0]


def test_a_setting_that_the_notebook_refuses_is_named_and_costs_nothing_else():
    limit = sys.getrecursionlimit()
    replies = TaskReply(settings={"recursion_limit": 1, "argv": sys.argv}), TaskReply()
    lines = NamespaceSession({}).apply_answers([RankAnswer(rank, "done", reply) for rank, reply in enumerate(replies)])
    assert [line.partition(":")[0] for line in lines] == ["the notebook keeps its setting recursion_limit"]
    assert sys.getrecursionlimit() == limit


def test_values_of_a_cell_without_answers_are_sent_again():
    session = NamespaceSession({"x": [1], "y": [2]})
    answers = [RankAnswer(rank, "done") for rank in range(2)]
    session.record_answers(pack(session, "y"), answers)
    cells = [pack(session, "x, y") for _ in range(2)]  # an interrupt has ended the first one before its request
    assert [{"x", "y"}.intersection(cell.sent_paths) for cell in cells] == [{"x"}, {"x"}]
    assert cells[1].bodies[0]["settings"]
    session.record_answers(cells[1], answers)
    assert {"x", "y"}.isdisjoint(pack(session, "x, y").sent_paths)
