"""The methods of accelerate's plugins of FSDP and DeepSpeed, which programs call on the plugin of an accelerator."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)

from accel_nb.accelerator.options.plugins import ProjectConfiguration as OwnConfiguration
from accel_nb.compat.accelerator import Accelerator
from accel_nb.compat.deepspeed.plugin import DeepSpeedPlugin
from accel_nb.compat.plugins import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, TorchDynamoPlugin
from accel_nb.compat.states import AcceleratorState
from accel_nb.errors import ConfigError, MisuseError


class Block(nn.Linear):
    """A layer that a policy names."""


@pytest.fixture(autouse=True)
def fresh_states() -> Iterator[None]:
    """Clear the shared states, which a test of the same process may have left."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def test_the_policy_becomes_a_function_for_a_model() -> None:
    model: Any = nn.Sequential(Block(2, 2), nn.ReLU())
    named = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap="Block"
    )
    named.set_auto_wrap_policy(model)
    assert isinstance(named.auto_wrap_policy, functools.partial)
    assert named.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block}}
    assert named.as_options()["fsdp.classes"] == ["Block"]

    sized = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=7)
    sized.set_auto_wrap_policy(model)
    assert isinstance(sized.auto_wrap_policy, functools.partial)
    assert sized.auto_wrap_policy.keywords == {"min_num_params": 7}

    whole = FullyShardedDataParallelPlugin(auto_wrap_policy="NO_WRAP")
    whole.set_auto_wrap_policy(model)
    assert whole.auto_wrap_policy is None


def test_the_blocks_that_a_model_names_itself_are_wrapped_and_unknown_ones_are_an_error() -> None:
    model: Any = nn.Sequential(Block(2, 2))
    model._no_split_modules = ["Block"]
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    plugin.set_auto_wrap_policy(model)
    assert isinstance(plugin.auto_wrap_policy, functools.partial)
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block}}
    other = FullyShardedDataParallelPlugin(
        auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"]
    )
    with pytest.raises(ValueError, match="has 'Layer', and no module of"):
        other.set_auto_wrap_policy(model)


def test_the_kind_of_state_is_that_of_whole_weights_unless_it_is_set() -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.state_dict_type) == (2, StateDictType.FULL_STATE_DICT)
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert plugin.state_dict_type is StateDictType.SHARDED_STATE_DICT
    assert plugin.as_options() == {"strategy": "fsdp"}


@pytest.mark.parametrize(
    ("version", "policy"), [(1, CPUOffload(True)), (2, CPUOffloadPolicy(torch.accelerator.is_available()))]
)
def test_names_and_booleans_become_the_objects_of_torch_that_programs_pass_on(version: int, policy: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, cpu_offload=True, backward_prefetch="NO_PREFETCH")
    assert (plugin.cpu_offload, plugin.backward_prefetch) == (policy, None)
    plugin.validate_cpu_offload()
    assert plugin.as_options() == {"strategy": "fsdp", "fsdp.cpu_offload": True}


@pytest.mark.parametrize(("text", "is_on"), [("1", True), ("yes", True), ("OFF", False), ("false", False)])
def test_switches_are_read_from_variables_in_all_usual_spellings(
    text: str, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OFFLOAD_PARAMS", "ACTIVATION_CHECKPOINTING", "USE_ORIG_PARAMS"):
        monkeypatch.setenv(f"FSDP_{name}", text)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.use_orig_params is is_on
    assert plugin.as_options() == {"strategy": "fsdp", "fsdp.cpu_offload": is_on, "activation_checkpointing": is_on}
    for name in ("FULLGRAPH", "DYNAMIC", "REGIONAL_COMPILATION"):
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_USE_{name}", text)
    compiled = TorchDynamoPlugin("eager", fullgraph=False)
    assert (compiled.fullgraph, compiled.dynamic, compiled.use_regional_compilation) == (False, is_on, is_on)


def test_a_number_of_micro_batches_that_is_not_the_launchers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    plugin = GradientAccumulationPlugin(num_steps=4)
    for accelerator in (Accelerator(cpu=True), Accelerator(cpu=True, gradient_accumulation_plugin=plugin)):
        assert accelerator.gradient_accumulation_steps == 4
    with pytest.raises(ValueError, match=r"steps=2, the variable ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4 disagree"):
        Accelerator(cpu=True, gradient_accumulation_steps=2)
    plugin.num_steps = 2
    with pytest.raises(ValueError, match=r"STEPS=4, num_steps of gradient_accumulation_plugin=2 disagree"):
        Accelerator(cpu=True, gradient_accumulation_plugin=plugin)


def test_folders_of_a_run_may_be_a_record_of_accel_nb(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, project_config=OwnConfiguration(), project_dir=tmp_path)  # pyright: ignore[reportArgumentType]
    assert (accelerator.project_dir, accelerator.logging_dir) == (tmp_path, tmp_path)


def test_the_version_decides_whether_gradients_are_gathered_ahead() -> None:
    first = FullyShardedDataParallelPlugin(fsdp_version=1, backward_prefetch="backward_post")
    second = FullyShardedDataParallelPlugin(backward_prefetch="backward_post")
    assert (first.backward_prefetch, second.backward_prefetch) == (BackwardPrefetch.BACKWARD_POST, None)


def test_options_of_state_dicts_are_those_of_their_kind() -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.state_dict_config == FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert plugin.state_dict_config == ShardedStateDictConfig(offload_to_cpu=True)
    assert plugin.optim_state_dict_config == ShardedOptimStateDictConfig(offload_to_cpu=True)
    own = FullStateDictConfig(offload_to_cpu=False)
    assert FullyShardedDataParallelPlugin(state_dict_config=own).state_dict_config is own


@pytest.mark.parametrize(("version", "last"), [(1, "buffer_dtype"), (2, "output_dtype")])
def test_a_policy_is_read_by_its_name_or_its_dtypes(version: int, last: str) -> None:
    kind: Any = MixedPrecision if version == 1 else MixedPrecisionPolicy
    dtypes: Any = dict.fromkeys(("param_dtype", "reduce_dtype", last), torch.bfloat16)
    for given in ("bf16", dtypes):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, mixed_precision_policy=given)
        assert plugin.mixed_precision_policy == kind(**dtypes)
        plugin.validate_mixed_precision_policy()
        assert plugin.as_options() == {"strategy": "fsdp", "precision": "bf16", "fsdp.reduce_dtype": "compute"}
    with pytest.raises(ValueError, match="param_dtype, reduce_dtype"):
        FullyShardedDataParallelPlugin(mixed_precision_policy={"param_dtype": torch.bfloat16})
    with pytest.raises(ValueError, match="mixed_precision_policy='int8' is none of fp8, fp16"):
        FullyShardedDataParallelPlugin(mixed_precision_policy="int8")


@pytest.mark.filterwarnings("ignore:.*there is one worker")
def test_the_policy_of_an_accelerator_is_that_of_its_precision_and_no_option_of_the_next() -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert Accelerator(cpu=True, fsdp_plugin=plugin).state.fsdp_plugin.mixed_precision_policy is None
    Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    assert plugin.as_options() == {"strategy": "fsdp"}
    AcceleratorState._reset_state(True)
    own = FullyShardedDataParallelPlugin(mixed_precision_policy="bf16")
    assert Accelerator(cpu=True, fsdp_plugin=own).mixed_precision == "bf16"
    AcceleratorState._reset_state(True)
    with pytest.raises(ConfigError, match="precision: 'no' from Accelerator"):
        Accelerator(cpu=True, mixed_precision="no", fsdp_plugin=own)


def test_the_second_version_has_no_local_state_dict() -> None:
    assert FullyShardedDataParallelPlugin(state_dict_type="LOCAL_STATE_DICT").state_dict_config is None
    with pytest.raises(ValueError, match="LOCAL_STATE_DICT"):
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT")
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD_ZERO2")
    assert plugin.sharding_strategy is ShardingStrategy._HYBRID_SHARD_ZERO2


def test_a_precision_that_is_not_the_accelerators_is_an_error() -> None:
    plugin = FullyShardedDataParallelPlugin()
    Accelerator(cpu=True, mixed_precision="bf16")
    plugin.set_mixed_precision(torch.bfloat16, override=True)
    plugin.set_mixed_precision("bf16")
    with pytest.raises(MisuseError, match="the accelerator has bf16; give Accelerator\\(mixed_precision='no'\\)"):
        plugin.set_mixed_precision(torch.float32)


def test_scripts_build_models_that_are_not_trained_in_a_context_of_deepspeed() -> None:
    plugin = DeepSpeedPlugin(zero_stage=3)
    with plugin.zero3_init_context_manager(enable=False):
        assert not plugin.is_zero3_init_enabled()
    assert plugin.as_options() == {
        "strategy": "deepspeed", "deepspeed.zero_stage": 3, "deepspeed.offload_optimizer": "no",
        "deepspeed.offload_parameters": "no", "clip": 1.0,
    }  # fmt: skip
