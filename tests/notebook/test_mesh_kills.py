"""Workers of a mesh that are killed in the middle of a step: the cell names them, and the next one trains as alone.

With ``MESH=all`` each worker of each mesh is killed in each place.
"""

from __future__ import annotations

import itertools
import os

import pytest

from tests.notebook.cells import done, run
from tests.notebook.expert_cells import SETUP as EXPERTS
from tests.notebook.mesh_cells import SETUP as LAYERS
from tests.support.nightly import nightly

MESHES = {
    "--pp 2 --tp 2": LAYERS, "--pp 2 --mesh.micro-batches 2": LAYERS, "--tp 2 --strategy fsdp": LAYERS,
    "--cp 2": LAYERS, "--ep 2": EXPERTS,
}  # fmt: skip
PLACES = ("forward", "backward", "step", "end")
# The first stage waits for gradients in its backward pass, and the last one for activations in its forward pass.
CASES = [
    nightly("--pp 2 --tp 2", 3, "backward"),
    ("--pp 2 --mesh.micro-batches 2", 0, "forward"),
    nightly("--cp 2", 2, "step"),
]
if os.environ.get("MESH") == "all":
    CASES = list(itertools.product(MESHES, range(4), PLACES))

TRAIN = """
losses = []
for x, y in loader:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""
KILL = """
import os
def reach(place):
    if (accelerator.process_index, len(losses), place) == {killed}:
        os.kill(os.getpid(), 9)

losses = []
for x, y in loader:
    reach("forward")
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    reach("backward")
    loss.backward()
    reach("step")
    optimizer.step()
    reach("end")
    losses.append(loss.item())
"""


@pytest.mark.parametrize(("flags", "rank", "place"), CASES)
def test_a_killed_worker_is_named_and_the_next_cell_trains_as_alone(kernel, flags: str, rank: int, place: str) -> None:
    setup = MESHES[flags].replace("Dropout(0.2)", "Dropout(0.0)")
    build = "model, optimizer, loader = build()\n"
    assert kernel.run(setup + build + TRAIN + "alone, alone_losses = model, losses\n" + build).error is None
    output = run(kernel, KILL.format(killed=(rank, 1, place)), f"--cpus 4 {flags}")
    assert output.error is not None
    assert f"rank {rank}" in output.error[1]
    assert kernel.run(build).error is None
    done(kernel, TRAIN, f"--cpus 4 {flags}")
    assert kernel.value("difference()") < 1e-9
    assert kernel.value("max(abs(a - b) for a, b in zip(losses, alone_losses, strict=True))") < 1e-9
