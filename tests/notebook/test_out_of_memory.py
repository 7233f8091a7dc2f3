"""A worker's memory runs out under a real limit of the system: who held it, and what would fit. The pool goes on."""

from __future__ import annotations

from tests.notebook.cells import done, run, setup
from tests.notebook.memory_cells import LIMIT, MODEL, NO_LIMIT, TRAIN

OWN_KERNEL = True
"""The memory of the kernel is limited."""


# Without the limit again: a rank that is stopped because the other one has raised opens a new group after the cell.
LEAK = """kept = []
try:
    while True:
        kept.append(torch.ones(2**22))
finally:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_step_that_does_not_fit_is_explained_and_the_workers_go_on(kernel):
    setup(kernel, MODEL)
    done(kernel, "import os\npid = os.getpid()")
    before = kernel.value("pid")
    output = run(kernel, LIMIT + TRAIN)
    assert output.error is not None
    assert output.error[0] == "RuntimeError"
    assert "can't allocate memory" in output.traceback
    assert "stepper.py" not in output.traceback, "frames between the cell and torch are left out"
    reported = output.traceback[output.traceback.index("Memory of rank") :]
    assert "32.0 MiB were requested" in reported
    assert "line 7: loss.backward()" in reported
    assert "activations saved for the backward pass in or after *.up" in reported
    assert "parameters  gradients" in reported
    (advice,) = [line for line in reported.splitlines() if "--accumulate" in line]
    assert " fits " in advice
    (again,) = [line for line in reported.splitlines() if "--activation-checkpointing" in line]
    assert " fits " in again
    done(kernel, NO_LIMIT)  # the limit counts addresses, of which the threads of a new group take many
    batch, parts = advice.split("batch_size=")[1].split()[0], advice.split("--accumulate ")[1].split(",")[0]
    kernel.run(f"loader = DataLoader(loader.dataset, batch_size={batch})")
    done(kernel, f"{TRAIN}import os\npid = os.getpid()", f"--cpus 2 --accumulate {parts}")
    assert kernel.value("pid") == before, "the same workers"


def test_what_a_cell_piles_up_is_named_with_its_line(kernel):
    setup(kernel, "import torch")
    output = run(kernel, LIMIT + LEAK)
    assert output.error is not None
    reported = output.traceback[output.traceback.index("Memory of rank") :]
    assert "16.0 MiB were requested" in reported
    assert "`kept (line 8)`" in reported
    assert "line 8: kept.append(torch.ones(2**22))" in reported
    done(kernel, "del kept\nprint(torch.ones(2**26).sum().item())")
