"""Functions and classes of the notebook, as workers receive them."""

from typing import Any

from torch.nn.attention import SDPBackend
from torch.optim.optimizer import register_optimizer_step_pre_hook

from accel_nb.pool.sync.stream import pickling

CELL = """
def outer(value):
    def inner():
        return 1 / value
    return inner
"""


def test_functions_keep_the_name_of_their_cell():
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(CELL, "<cell 3>", "exec"), namespace)
    stream, buffers = pickling.dump(namespace["outer"], namespace=namespace, shared={})
    outer = pickling.load(stream, buffers, namespace={})
    assert outer.__code__.co_filename == outer(0).__code__.co_filename == "<cell 3>"


OPTIMIZER = """
import torch

class Own(torch.optim.Optimizer):
    def step(self, closure=None):
        return "stepped"

optimizer = Own([torch.zeros(1)], {})
"""


def test_functions_that_a_library_has_decorated_use_its_own_globals():
    """torch wraps the ``step`` of a class of the notebook, and looks up its hooks when that is called."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(OPTIMIZER, namespace)
    stream, buffers = pickling.dump(namespace["Own"].step, namespace=namespace, shared={})
    step = pickling.load(stream, buffers, namespace={})
    steps = []
    handle = register_optimizer_step_pre_hook(lambda *args: steps.append(args))
    try:
        assert step(namespace["optimizer"]) == "stepped"
    finally:
        handle.remove()
    assert len(steps) == 1


def test_a_class_that_its_module_has_under_another_name_is_the_same_one():
    assert SDPBackend.__qualname__ != "SDPBackend"
    stream, buffers = pickling.dump([SDPBackend, SDPBackend.MATH], namespace={}, shared={})
    kind, member = pickling.load(stream, buffers, namespace={})
    assert kind is SDPBackend
    assert member == SDPBackend.MATH
