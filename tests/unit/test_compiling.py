"""Compilation of models in place, and its undoing."""

import gc
import weakref

from torch import nn

from accel_nb.accelerator.prepare.compiling import Compiler
from accel_nb.config.sections import CompileOptions


def test_a_freed_model_leaves_no_record() -> None:
    compiler = Compiler(CompileOptions(backend="eager"))
    model = nn.Linear(2, 2)
    compiler.compile(model)
    freed = weakref.ref(model)
    del model
    gc.collect()
    assert freed() is None
    assert len(compiler._compiled) == 0, "a new model may get the id of one that is gone"


def test_blocks_that_the_user_compiled_are_so_afterwards() -> None:
    blocks = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(nn.ModuleList(blocks))
    blocks[0].compile(backend="eager")
    before = [block._compiled_call_impl for block in blocks]
    compiler = Compiler(CompileOptions(backend="eager", regional=True))
    compiler.compile(model)
    assert compiler.has_compiled_blocks(model)
    compiler.undo(model)
    assert [block._compiled_call_impl for block in blocks] == before
    assert before[0] is not None
