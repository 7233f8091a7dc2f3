"""The modules and names of accelerate that can be imported: supported ones, and ones that raise an error on use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel_nb.compat.served_names import SERVED, places_in
from accel_nb.compat.unserved_names import FOR_IMPORT

UNSUPPORTED = frozenset(name for names in FOR_IMPORT.values() for name in names.split())
"""Unsupported names that libraries import (transformers and peft above all); using one raises an error."""

MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        module: {**places_in("accel_nb.compat.unserved", FOR_IMPORT.get(module, "")), **SERVED.get(module, {})}
        for module in sorted({*SERVED, *FOR_IMPORT})
    }
)
"""For each importable module its names, each with the place ``module:attribute`` of the object."""

_PARTS = {
    "the inner parts of big models differ here; the functions that place, load and offload them are offered": (
        "align_module_device compute_module_sizes find_tied_parameters get_balanced_memory get_max_memory hooks "
        "modeling offload offload_state_dict set_module_tensor_to_device add_hook_to_module remove_hook_from_module "
        "AlignDevicesHook CpuOffload ModelHook SequentialHook UserCpuOffloadHook remove_hook_from_submodules "
        "OffloadedWeightsLoader has_offloaded_params clean_device_map get_max_layer_size named_module_tensors"
    ),
    "checkpoints are saved and loaded by Accelerator.save_state, load_state and skip_first_batches": (
        "checkpointing load load_accelerator_state load_custom_state save_accelerator_state save_custom_state "
        "SkipBatchSampler SkipDataLoader load_state_dict clean_state_dict_for_safetensors"
    ),
    'FSDP2 is served as strategy="fsdp", and ZeRO as strategy="deepspeed", without this name': (
        "DeepSpeedSequenceParallelConfig MegatronLMPlugin "
        "DeepSpeedSchedulerWrapper HfDeepSpeedConfig ParallelismConfig "
        "TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin deepspeed "
        "fsdp_utils megatron_lm parallelism_config merge_fsdp_weights DummyOptim DummyScheduler GatheredParameters "
        "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer "
        "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading"
    ),
    "fp8 is torchao's here, chosen by mixed_precision='fp8' and AORecipeKwargs": (
        "FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs ao transformer_engine"
    ),
    "log_with accepts names and custom trackers directly": (
        "filter_trackers get_available_trackers register_tracker_class"
    ),
    "functions are sent to the workers without a wrapper": "PrepareForLaunch",
    "XLA is served as strategy='xla', without this name": "torch_xla",
    "it belongs to accelerate's command line; here it is accel-nb": "commands launch write_basic_config",
    "it belongs to accelerate's own tests": "test_utils",
    "loaders are sharded in place, by Accelerator.prepare": (
        "BatchSamplerShard IterableDatasetShard DataLoaderAdapter DataLoaderStateMixin prepare_data_loader get_sampler"
    ),
    "records of options share no base class here": "KwargsHandler",
}

UNSUPPORTED_REASONS: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _PARTS.items() for name in names.split()}
)
"""The reasons why names are not supported."""


def reason_for(path: str) -> str:
    """Return why a module or name, given with dots, is not supported."""
    found = (UNSUPPORTED_REASONS[part] for part in reversed(path.split(".")) if part in UNSUPPORTED_REASONS)
    return next(found, "it has no counterpart here; docs/migration.md lists what there is")
