"""Degrees of meshes with the other package's names."""

from __future__ import annotations

import pytest

from accel_nb import Accelerator
from accel_nb.accelerator.options.mesh_plugins import MegatronLMPlugin, TorchTensorParallelPlugin
from accel_nb.errors import ConfigError


def test_degrees_of_megatron_become_those_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    given = MegatronLMPlugin(tp_degree=2, pp_degree=4, num_micro_batches=8, recompute_activations=True)
    assert given.as_options() == {
        "mesh.tp": 2,
        "mesh.pp": 4,
        "mesh.micro_batches": 8,
        "clip": 1.0,
        "activation_checkpointing": True,
    }
    monkeypatch.setenv("MEGATRON_LM_TP_DEGREE", "2")
    monkeypatch.setenv("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER", "true")
    monkeypatch.setenv("MEGATRON_LM_GRADIENT_CLIPPING", "0.5")
    read = MegatronLMPlugin(context_parallel_size=2, expert_model_parallel_size=1)
    assert read.as_options() == {"mesh.tp": 2, "mesh.cp": 2, "clip": 0.5, "strategy": "fsdp"}
    assert TorchTensorParallelPlugin(tp_size=2).as_options() == {"mesh.tp": 2}
    assert TorchTensorParallelPlugin().as_options() == {}


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "two")
    with pytest.raises(ConfigError, match="the variable MEGATRON_LM_PP_DEGREE is 'two'; it must be a whole number"):
        MegatronLMPlugin()


def test_what_has_no_counterpart_is_named() -> None:
    plugin = MegatronLMPlugin(sequence_parallelism=True, eod_mask_loss=True)
    with pytest.raises(ConfigError, match="eod_mask_loss, sequence_parallelism from MegatronLMPlugin"):
        Accelerator(cpu=True, megatron_lm_plugin=plugin)
    with pytest.raises(TypeError, match="no field 'tp_degre'"):
        MegatronLMPlugin(tp_degre=2)
    with pytest.raises(ConfigError, match=r"mesh\.tp"):
        Accelerator(cpu=True, torch_tp_plugin=TorchTensorParallelPlugin(3))


def test_an_accelerator_takes_the_options() -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(gradient_clipping=0.3))
    assert accelerator.resolved.config.clip == 0.3
