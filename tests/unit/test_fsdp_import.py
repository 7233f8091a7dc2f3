"""FSDP's options under other names: each becomes an option, is not needed, or is refused by name."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_nb import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accel_nb.config.accelerate_import import import_accelerate
from accel_nb.errors import ConfigError

FILE = {
    "distributed_type": "FSDP",
    "num_machines": 2,
    "machine_rank": 0,
    "num_processes": 8,
    "fsdp_config": {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "Block, Head",
        "fsdp_min_num_params": 1000,
        "fsdp_offload_params": True,
        "fsdp_activation_checkpointing": True,
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_use_orig_params": True,
        "fsdp_of_tomorrow": 1,
    },
}


def test_the_section_of_a_config_file_is_accounted_for_value_by_value():
    found = import_accelerate(FILE, "default_config.yaml")
    assert found.options == {
        "strategy": "fsdp",
        "gpus": 4,
        "fsdp.reshard_after_forward": False,
        "fsdp.hybrid_shard_size": 4,
        "fsdp.wrap": "classes",
        "fsdp.classes": ["Block", "Head"],
        "fsdp.cpu_offload": True,
        "activation_checkpointing": True,
    }
    assert found.not_needed["fsdp_config.fsdp_min_num_params"] == "auto_wrap_policy does not use sizes"
    assert set(found.not_imported) == {"num_machines", "fsdp_config.fsdp_of_tomorrow"}
    assert len(found.imported) + len(found.not_needed) + len(found.not_imported) == 4 + len(FILE["fsdp_config"])


@pytest.mark.parametrize(
    ("values", "options"),
    [
        ({}, {}),
        ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}, {"fsdp.reshard_after_forward": False}),
        ({"sharding_strategy": 1}, {"fsdp.reshard_after_forward": True}),
        ({"sharding_strategy": "2"}, {"fsdp.reshard_after_forward": False}),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, {"fsdp.reshard_after_forward": False}),
        ({"reshard_after_forward": False}, {"fsdp.reshard_after_forward": False}),
        ({"auto_wrap_policy": "no_wrap"}, {"fsdp.wrap": "model"}),
        ({"auto_wrap_policy": "transformer_based_wrap"}, {"fsdp.wrap": "blocks"}),
        (
            {"auto_wrap_policy": "size_based_wrap", "min_num_params": 9},
            {"fsdp.wrap": "size", "fsdp.min_params": 9},
        ),
        (
            {"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=7)},
            {"fsdp.wrap": "size", "fsdp.min_params": 7},
        ),
        (
            {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})},
            {"fsdp.wrap": "classes", "fsdp.classes": ["Linear"]},
        ),
        ({"cpu_offload": CPUOffload(offload_params=True)}, {"fsdp.cpu_offload": True}),
        ({"cpu_offload": CPUOffload(offload_params=False)}, {"fsdp.cpu_offload": False}),
        ({"cpu_offload": CPUOffloadPolicy()}, {"fsdp.cpu_offload": True}),
        ({"cpu_offload": OffloadPolicy()}, {"fsdp.cpu_offload": False}),
        ({"cpu_offload": "true"}, {"fsdp.cpu_offload": "true"}),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "use_orig_params": False, "fsdp_version": 2}, {}),
        ({"ignored_modules": "head", "mixed_precision_policy": "fp32"}, {"precision": "no"}),
        ({"mixed_precision_policy": "bf16"}, {"precision": "bf16", "fsdp.reduce_dtype": "compute"}),
        (
            {"mixed_precision_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
            {"precision": "bf16", "fsdp.reduce_dtype": "fp32"},
        ),
        (
            {"mixed_precision_policy": MixedPrecision(torch.float16)},
            {"precision": "fp16", "fsdp.reduce_dtype": "compute"},
        ),
        ({"mixed_precision_policy": {"reduce_dtype": torch.float32}}, {}),
        ({"state_dict_config": FullStateDictConfig(), "optim_state_dict_config": FullOptimStateDictConfig()}, {}),
    ],
)
def test_the_plugin_chooses_the_strategy_and_sets_its_options(values: dict[str, Any], options: dict[str, Any]):
    assert FullyShardedDataParallelPlugin(**values).as_options() == {"strategy": "fsdp", **options}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sharding_strategy": "NO_SHARD"}, "shards nothing: use strategy ddp"),
        ({"sharding_strategy": "HYBRID_SHARD"}, "set fsdp.hybrid_shard_size"),
        ({"sharding_strategy": "MOST"}, "not one of FULL_SHARD"),
        ({"auto_wrap_policy": lambda module: True}, "the function <lambda>.* not a known wrap policy"),
        ({"mixed_precision_policy": "fp8", "param_init_fn": print}, "give mixed_precision.*param_init_fn"),
        ({"mixed_precision_policy": {"reduce_dtype": torch.float16}}, "averaged in the precision"),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, "set fsdp.hybrid_shard_size"),
        ({"fsdp_version": 3}, "there is no version"),
        ({"cpu_offload": 1}, "fsdp.cpu_offload"),
    ],
)
def test_what_nothing_stands_for_is_refused_with_every_problem(values: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as raised:
        Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**values))
    assert re.search(words, str(raised.value), re.DOTALL), str(raised.value)


@pytest.mark.parametrize("name", ["fsdp_plugin", "deepspeed_plugin"])
def test_with_one_worker_a_plugin_shards_nothing_and_its_other_options_apply(name: str):
    stages = {"zero_optimization": {"stage": 2}}
    if name == "fsdp_plugin":
        plugin: Any = FullyShardedDataParallelPlugin(cpu_offload=True, mixed_precision_policy="bf16")
        reported = r"strategy, fsdp\.cpu_offload, fsdp\.reduce_dtype; applied: precision"
    else:
        plugin = DeepSpeedPlugin(hf_ds_config=stages, gradient_clipping=0.5)
        reported = r"strategy, deepspeed\.zero_stage; applied: clip"
    with pytest.warns(UserWarning, match=f"{type(plugin).__name__}.*one worker. Without an effect: {reported}"):
        accelerator = Accelerator(cpu=True, **{name: plugin})
    if name == "fsdp_plugin":
        assert accelerator.mixed_precision == "bf16"
    else:
        assert accelerator.resolved.config.clip == 0.5
    assert accelerator.describe()["strategy"] == "single"
    assert getattr(accelerator.state, name) is plugin
    assert accelerator.deepspeed_plugin is accelerator.state.deepspeed_plugin
    assert Accelerator(cpu=True).state.fsdp_plugin is None
    assert DeepSpeedPlugin(hf_ds_config=stages).deepspeed_config == stages
