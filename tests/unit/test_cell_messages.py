"""Requests and replies of cells arrive as the records that were sent, or are refused with the wrong field named."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from accel_nb.errors import PoolError
from accel_nb.notebook.messages import (
    CallRequest,
    ErrorReport,
    RankAnswer,
    RunRequest,
    TaskReply,
    read_answer,
    to_body,
)
from accel_nb.pool.control.stop_escalation import RankResult, WorkerDeath
from accel_nb.pool.sync.result_transfer import ReturnRecord
from accel_nb.runtime.process.typed_records import build_record
from accel_nb.telemetry.out_of_memory import MemoryHolder, OutOfMemoryReport

REQUEST = RunRequest(
    source="x = 1", compiler_flags=0, execution_count=3, used=("a",), bound=("x",), assigned=("config:lr",),
    shared=("a", "b"), is_plain=True,
    only_reads_accelerator=False, uses_accelerator=False, may_depend_on_rank=False, is_empty=False, call=None,
    sources={"cell": ["x = 1", "[3]"]}, config="{}", cwd="/", sys_path=("/lib",), variables={"A": None}, settings={},
    is_on_some_ranks=False, has_lost_ranks=False, is_idle=False,
)  # fmt: skip
REPLY = TaskReply(
    error=ErrorReport("ValueError", "builtins", "no", ("line",), None),
    memory=OutOfMemoryReport("cpu", None, 1, {"parameters": 2}, 3, 4, 5, "line 1", "", (MemoryHolder("`x`", 6),)),
    fingerprints=("f", None),
    lines=("saved",),
    modules={"module": ["/module.py", 1, 2]},
    returned=ReturnRecord(not_returned={"y": ""}, rng=None, weights={}),
)


def sent(body: dict[str, Any]) -> dict[str, Any]:
    """Return what arrives at the other end of a channel."""
    return json.loads(json.dumps(body))


@pytest.mark.parametrize("call", [None, CallRequest("f", {"A": "1"})])
def test_requests_arrive_as_they_were_sent(call: CallRequest | None) -> None:
    request = replace(REQUEST, call=call)
    assert build_record(RunRequest, sent(to_body(request))) == request


@pytest.mark.parametrize("reply", [REPLY, TaskReply()])
def test_replies_arrive_as_they_were_sent(reply: TaskReply) -> None:
    assert read_answer(RankResult(1, "raised", sent(reply.to_body()))) == RankAnswer(1, "raised", reply)


def test_a_rank_that_died_has_no_reply_of_its_own() -> None:
    death = WorkerDeath(-9, is_killed=False, killed_for="group")
    assert read_answer(RankResult(1, "died", death=death)) == RankAnswer(1, "died", death=death)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"lines": "saved"}, "lines of TaskReply"),
        ({"extra": 1}, "TaskReply lacks, or has no such fields: extra"),
        ({"error": {"type": "ValueError"}}, "ErrorReport lacks"),
        ({"error": ["ValueError"]}, "ErrorReport is not a mapping"),
        (
            {"returned": {"not_returned": [], "rng": None, "weights": {}, "replaced": []}},
            "not_returned of ReturnRecord",
        ),
        ({"has_run": None}, "has_run of TaskReply"),
    ],
)
def test_a_wrong_reply_is_refused_with_the_field(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(PoolError, match=f"rank 1 sent a wrong reply: {problem}"):
        read_answer(RankResult(1, "raised", sent(REPLY.to_body() | change)))
