"""A frozen node is lost, the next pool runs on the other, and the node that thaws ends its workers."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from accel_nb.errors import PoolError
from accel_nb.pool.engine import WorkerSpec
from accel_nb.pool.pool import Pool
from tests.conftest import wait_for
from tests.support.agents import two_agents
from tests.support.pools import PRELOAD, PROGRAM, run_code

REDUCE = "import torch, torch.distributed as dist\nt = torch.ones(1)\n"


def started_agents() -> list[psutil.Process]:
    """Return the processes of the agents near and far. Process ids may start again at low numbers."""

    def find() -> list[psutil.Process]:
        children = sorted(psutil.Process().children(), key=psutil.Process.create_time)
        return [child for child in children if "accel_nb.pool.nodes.agent" in child.cmdline()]

    assert wait_for(lambda: len(find()) == 2)  # Linux shows no command line of a process that has just begun it
    return find()


def test_a_frozen_node_is_lost_and_stays_lost():
    engine = two_agents(PROGRAM, PRELOAD, lost_after_s=4, lease_s=5)
    try:
        _, far = started_agents()
        pool = Pool(engine, [WorkerSpec("cpu", 1, node) for node in (0, 0, 1, 1)])
        pool.wait_ready()
        answers, _ = run_code(
            pool, f"{REDUCE}dist.all_reduce(t)\nimport os\nresult = [t.item(), os.environ['LOCAL_RANK']]"
        )
        found = {answer.rank: answer.body["result"] for answer in answers}
        assert found == {0: [4.0, "0"], 1: [4.0, "1"], 2: [4.0, "0"], 3: [4.0, "1"]}

        family = [far, *far.children(recursive=True)]
        for process in family:
            process.send_signal(signal.SIGSTOP)
        answers, reason = run_code(pool, f"{REDUCE}dist.all_reduce(t)")
        assert reason == "death"
        lost = {answer.rank: answer.death.lost_node for answer in answers if answer.outcome == "died"}
        assert sorted(lost) == [2, 3]
        assert lost[2].startswith("node far was lost: it has not answered for 4.")
        assert pool.state == "failed"
        assert list(engine.facts().lost_nodes) == [1]
        with pytest.raises(PoolError, match="node far was lost"):
            Pool(engine, [WorkerSpec("cpu", 1, 1)])

        pool = Pool(engine, [WorkerSpec("cpu", 1)] * 2)
        pool.wait_ready()
        for process in family:
            process.send_signal(signal.SIGCONT)
        assert psutil.wait_procs(family, timeout=20)[1] == [], "its lease ends its workers"
        answers, reason = run_code(pool, f"{REDUCE}dist.all_reduce(t)\nresult = t.item()")
        assert [answer.body["result"] for answer in answers] == [2.0, 2.0]
        assert reason is None
    finally:
        engine.stop()


def test_an_agent_whose_kernel_has_gone_leaves_nothing():
    engine = two_agents(PROGRAM, PRELOAD)
    try:
        agents = started_agents()
        pool = Pool(engine, [WorkerSpec("cpu", 1, node) for node in (0, 1)])
        pool.wait_ready()
        family = [process for agent in agents for process in (agent, *agent.children(recursive=True))]
        assert len(family) == 6, "agent, zygote and worker of each node"
        os.kill(agents[1].pid, signal.SIGKILL)
        answers, reason = run_code(pool, f"{REDUCE}dist.all_reduce(t)")
        assert reason == "death"
        assert "the process that starts its workers has ended" in next(a.death.lost_node for a in answers if a.death)
    finally:
        engine.stop()
    assert psutil.wait_procs(family, timeout=10)[1] == []
