"""The functions that a model's classes compute with."""

import torch
from torch import nn

from accel_nb.accelerator import Accelerator
from accel_nb.accelerator.plain_cells.autoprepare import PlainCells
from accel_nb.accelerator.training.model_code import code_in
from accel_nb.runtime.tensors.instance_patching import patch_instance


def test_the_code_of_a_model_is_that_of_its_plain_class_however_often_it_is_patched():
    model = nn.Sequential(nn.Linear(2, 1))
    before = code_in(model)
    for _ in range(2):
        patch_instance(model, {"forward": lambda self, x: x})
        patch_instance(model[0], {"forward": lambda self, x: x})
    assert code_in(model) == before


def test_statements_after_the_first_do_not_visit_the_modules_of_a_prepared_model(monkeypatch):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    namespace = {"model": model, "optimizer": optimizer, "plan": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    accelerator = Accelerator(cpu=True)
    cells = PlainCells(accelerator)
    with cells.run_cell():
        assert len(cells.prepare(namespace, namespace).objects) == 3
        monkeypatch.setattr(nn.Module, "named_modules", lambda *args, **kwargs: 1 / 0)
        assert not cells.prepare(namespace, namespace).objects
        monkeypatch.undo()
    accelerator.close()
