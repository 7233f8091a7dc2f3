"""The notebook about fine-tuning, executed from top to bottom with the packages that it names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.notebook.execution import Executed, execute

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def executed() -> Executed:
    return execute(
        "08_fine_tuning.ipynb",
        '{"before": before, "after": after, "tuned": tuned_loss, "unchanged": unchanged, "saved": saved, '
        '"steps": steps, "history": history, "count": len(data)}',
    )


def test_the_notebook_trains_adapters_by_a_loop_and_by_a_trainer(executed: Executed) -> None:
    facts: dict[str, Any] = executed.facts()
    assert executed.errors() == {}
    assert facts["count"] == 192
    assert facts["after"] < 0.8 * facts["before"]
    assert facts["tuned"] < 0.8 * facts["before"]
    assert facts["unchanged"]
    assert "adapter_model.safetensors" in facts["saved"]
    assert facts["steps"] == 30
    assert facts["history"][-1] < facts["history"][0]
    receipt = executed.displays("train")[0]["text/plain"]
    assert "batch 32 = 2 x 16" in receipt
