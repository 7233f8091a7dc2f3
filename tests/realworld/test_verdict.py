"""How the corpus classifies: a case that differs and says nothing is never taken for a good one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.realworld.case import Case, Cell, read_case, read_cases
from tests.realworld.summary import summary_lines
from tests.realworld.values import differences, read_values, write_values
from tests.realworld.verdict import OF_SHARE, Run, complaint, judge
from tests.support.kernel import Output

CASE = Case("group/name", "equal", "", ("w",), (Cell("w = 1", ""),), share=("losses",))
RECEIPT = "2 workers on cpu, 1 thread each · ddp · precision no · prepared loader DataLoader (batch 8 = 2 x 4)"
WAIT = "rank 0 waits in all_gather #2 of shape [[1]] for rank 1, which is at line 2 of the cell: for epoch in range(2):"
WARNING = (
    "/tmp/cell.py:3: UserWarning: this loss is no mean: `--strategy single` computes it whole\n  loss.backward()\n"
)


def run(w: float, *, losses: float = 1.0, stderr: str = "", receipt: str = RECEIPT, **ends: object) -> Run:
    output = Output(stderr=stderr, displays=[{"text/plain": receipt}], **ends)  # type: ignore[arg-type]
    return Run({"w": w}, {"losses": losses}, [output])


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (run(1.0), "equal"),
        (run(1.0 + 1e-9), "equal"),
        (run(1.1), "silent"),
        (run(1.1, receipt=f"{RECEIPT} · {OF_SHARE}"), "silent"),
        (run(float("nan")), "silent"),
        (run(1.1, stderr="lib.py:1: DeprecationWarning: this name will go away\n"), "silent"),
        (run(1.1, stderr=WARNING), "told"),
        (run(1.0, stderr=WARNING), "told"),
        (run(1.1, receipt=f"{RECEIPT} · dropout differs from a run on one device"), "told"),
        (run(1.0, receipt=f"{RECEIPT} · {WAIT}"), "equal"),
        (run(1.1, receipt=f"{RECEIPT} · {WAIT}"), "silent"),
        (run(1.0, losses=2.0), "silent"),
        (run(1.0, losses=2.0, receipt=f"{RECEIPT} · {OF_SHARE}"), "equal"),
        (run(1.0, error=("ValueError", "shapes"), traceback="ValueError: shapes"), "failed"),
        (run(1.0, error=("UnsyncedGradientError", "w"), traceback="UnsyncedGradientError: w"), "refused"),
        (run(1.0, error=("PoolError", "torch.jit.NotSupportedError: args"), traceback="NotSupportedError"), "failed"),
        (run(1.0, error=("ValueError", "shapes"), traceback="ValueError: shapes\nthe batch was divided"), "refused"),
    ],
)
def test_class_of_a_run(other: Run, kind: str) -> None:
    assert judge(CASE, run(1.0), other).kind == kind


def test_what_the_plain_run_says_too_is_not_said_by_us() -> None:
    assert judge(CASE, run(1.0, stderr=WARNING), run(1.1, stderr=WARNING)).kind == "silent"


def test_the_value_of_a_last_expression_is_not_said_by_us() -> None:
    other = run(1.1)
    other.outputs.append(Output(displays=[{"text/plain": "tensor(0.1234)"}], result="tensor(0.1234)"))
    assert judge(CASE, run(1.0), other).kind == "silent"


def test_a_value_that_did_not_come_back_differs() -> None:
    assert judge(CASE, run(1.0), Run({}, {}, [])).kind == "silent"


def test_only_the_declared_outcome_with_its_words_is_accepted() -> None:
    told = judge(CASE, run(1.0), run(1.1, stderr=WARNING))
    assert complaint(replace(CASE, outcome="told", words="`--STRATEGY single`"), told) is None
    assert "nothing says 'dropout'" in str(complaint(replace(CASE, outcome="told", words="dropout"), told))
    assert "is told, declared equal" in str(complaint(CASE, told))
    silent = judge(CASE, run(1.0), run(1.1))
    assert "w: differs by up to 0.1" in str(complaint(CASE, silent))
    for declared in (CASE, replace(CASE, outcome="told", words="dropout"), replace(CASE, outcome="refused", words="w")):
        assert complaint(declared, silent) is not None
        assert complaint(declared, judge(CASE, run(1.0), run(1.0, error=("KeyError", "w")))) is not None
    refused = judge(CASE, run(1.0), run(1.0, error=("MisuseError", "w is missing"), traceback="MisuseError"))
    assert complaint(replace(CASE, outcome="refused", words="missing"), refused) is None
    assert complaint(replace(CASE, outcome="refused", words="other"), refused) is not None


def test_values_of_a_notebook_are_compared_leaf_by_leaf(tmp_path) -> None:
    model = torch.nn.Linear(2, 1)
    names = {"model": model, "history": {"loss": [1, 2.5]}, "label": "a", "none": None, "pair": (torch.ones(2), {3})}
    write_values(["model", "history", "label", "none", "pair", "absent"], names, str(tmp_path / "one"))
    plain = read_values(tmp_path / "one")
    assert differences(plain, dict(plain)) == []
    with torch.no_grad():
        model.bias.add_(1)
    names["history"]["loss"].append(3)
    names["label"], names["absent"] = "b", 1
    write_values(["model", "history", "label", "none", "pair", "absent"], names, str(tmp_path / "two"))
    found = " ".join(differences(plain, read_values(tmp_path / "two")))
    for part in ("model['bias']: differs by up to 1", "history['loss'] (length)", "label: 'a' plainly", "absent:"):
        assert part in found
    assert "weight" not in found
    assert "none" not in found


def test_a_case_file_is_read() -> None:
    text = (
        "# Shape.\n# outcome: told dropout\n# compare: model, 1 + 2\n# runs: always\n"
        "# %%\nx = 1\n# %% accelerate --clip 1\ny = 2\n"
    )
    case = read_case("group/name", text)
    assert (case.outcome, case.words, case.compare, case.is_fast) == ("told", "dropout", ("model", "1 + 2"), True)
    assert case.cells == (Cell("x = 1\n"), Cell("y = 2\n", "--clip 1"))
    for wrong in ("told dropout", "told", "equal words", "maybe"):
        with pytest.raises(ValueError, match="group/name"):
            read_case("group/name", text.replace("# %% acc", "# %% axx").replace("told dropout", wrong))


def test_the_corpus_is_as_large_as_promised() -> None:
    assert len(read_cases()) >= 70
    assert {case.outcome for case in read_cases()} == {"equal", "told", "refused"}


def test_the_summary_names_the_cases_of_the_classes_that_must_be_empty() -> None:
    reports = [
        SimpleNamespace(when="call", nodeid=f"file::test[{name}]", user_properties=[("realworld", kind)])
        for name, kind in [("a/b-2", "equal"), ("c/d-2", "silent"), ("e/f-3", "failed")]
    ]
    assert summary_lines([]) == []
    text = "\n".join(summary_lines(reports))
    assert "equal       1\n" in text
    assert "failed      1  must be 0: e/f-3" in text
    assert "silent      1  must be 0: c/d-2" in text
