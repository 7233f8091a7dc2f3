"""The supported names of accelerate by module, and the objects of accel_nb that provide them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel_nb.compat.unserved_names import FOR_IMPORT, PACKAGE

_PLUGINS = "accel_nb.accelerator.options.plugins"
_STATE = "accel_nb.accelerator.process_state"
_OPERATIONS = "accel_nb.accelerator.process.operations"
_HF_UTILS = "accel_nb.compat.hf_utils"
_AVAILABLE = "accel_nb.compat.availability"


def _in(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names.split()}


_RECORDS = _in("accel_nb.accelerator.options.fsdp_plugin", "FullyShardedDataParallelPlugin") | _in(
    _PLUGINS,
    "AORecipeKwargs AutocastKwargs DDPCommunicationHookType DataLoaderConfiguration DeepSpeedPlugin "
    "DistributedDataParallelKwargs "
    "GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs ProfileKwargs ProjectConfiguration "
    "TorchDynamoPlugin",
)
_DATACLASSES = {
    **_RECORDS,
    **_in(_STATE, "DistributedType"),
    **_in(_HF_UTILS, "DynamoBackend LoggerType PrecisionType RNGType"),
}
_COLLECTIVES = _in(
    _OPERATIONS,
    "broadcast broadcast_object_list concatenate convert_outputs_to_fp32 convert_to_fp32 find_batch_size find_device "
    "gather gather_object listify pad_across_processes recursively_apply reduce send_to_device slice_tensors",
)
_NESTED = {**_COLLECTIVES, **_in(_HF_UTILS, "honor_type is_namedtuple is_torch_tensor")}
_MEMORY = {
    "clear_device_cache": f"{_HF_UTILS}:clear_device_cache",
    "find_executable_batch_size": "accel_nb.accelerator.training.batch_size:find_executable_batch_size",
    "release_memory": "accel_nb.accelerator.process.memory_release:release_memory",
    "should_reduce_batch_size": "accel_nb.accelerator.process.memory_release:is_out_of_memory",
}
_RANDOM = {
    **_in("accel_nb.accelerator.process.seeding", "set_seed synchronize_rng_states"),
    "synchronize_rng_state": f"{_HF_UTILS}:synchronize_rng_state",
}
_ENVIRONMENT = {
    **_in("accel_nb.runtime.process.environment", "clear_environment patch_environment"),
    **_in(_HF_UTILS, "get_int_from_env parse_choice_from_env parse_flag_from_env str_to_bool"),
}
_VERSIONS = _in(_HF_UTILS, "compare_versions is_torch_version")
_OTHER = {
    **_in(_OPERATIONS, "wait_for_everyone"),
    **_in(_HF_UTILS, "save"),
    **_in(_HF_UTILS, "convert_bytes extract_model_from_parallel is_compiled_module is_port_in_use merge_dicts"),
    **_in(_HF_UTILS, "recursive_getattr"),
}
_IMPORTS = _in(
    _AVAILABLE,
    "is_aim_available is_bf16_available is_bnb_available is_boto3_available is_clearml_available is_comet_ml_available "
    "is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available is_fp16_available "
    "is_fp8_available is_hpu_available is_ipex_available is_lomo_available is_matplotlib_available "
    "is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available is_msamp_available "
    "is_musa_available is_neuron_available is_npu_available is_pandas_available is_peft_available is_pippy_available "
    "is_pynvml_available is_pytest_available is_rich_available is_rocm_available is_sagemaker_available "
    "is_schedulefree_available is_sdaa_available is_swanlab_available is_tensorboard_available is_timm_available "
    "is_torch_xla_available is_torchao_available is_torchdata_available is_torchvision_available is_trackio_available "
    "is_transformer_engine_available is_transformers_available is_triton_available is_wandb_available is_xpu_available",
)
_CONSTANTS = _in(
    _HF_UTILS,
    "MODEL_NAME OPTIMIZER_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAMPLER_NAME "
    "SCALER_NAME SCHEDULER_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME",
)
UNSUPPORTED = frozenset(name for names in FOR_IMPORT.values() for name in names.split())
"""Unsupported names that libraries import (transformers and peft above all); using one raises an error."""

_TQDM = _in("accel_nb.accelerator.process.progress", "tqdm")

_LAUNCHERS = _in("accel_nb", "debug_launcher notebook_launcher")
_RESUME = _in("accel_nb", "skip_first_batches")
_TRACKERS = {
    **_in("accel_nb", "GeneralTracker"),
    **_in(_HF_UTILS, "on_main_process"),
    **{
        theirs: f"accel_nb.telemetry.trackers.{module}:{ours}"
        for theirs, module, ours in (
            ("AimTracker", "aim", "AimTracker"),
            ("ClearMLTracker", "clearml", "ClearmlTracker"),
            ("CometMLTracker", "comet_ml", "CometTracker"),
            ("DVCLiveTracker", "dvclive", "DvcliveTracker"),
            ("MLflowTracker", "mlflow", "MlflowTracker"),
            ("SwanLabTracker", "swanlab", "SwanlabTracker"),
            ("TensorBoardTracker", "tensorboard", "TensorBoardTracker"),
            ("TrackioTracker", "trackio", "TrackioTracker"),
            ("WandBTracker", "wandb", "WandbTracker"),
        )
    },
}
_BIG = _in(
    "accel_nb",
    "attach_layerwise_casting_hooks cpu_offload cpu_offload_with_hook disk_offload dispatch_model init_empty_weights "
    "init_on_device load_checkpoint_and_dispatch",
)
_DEVICE_MAPS = _in("accel_nb", "check_device_map infer_auto_device_map load_checkpoint_in_model")
_QUANTIZING = _in("accel_nb", "BnbQuantizationConfig load_and_quantize_model")
_STAGES = {"prepare_pippy": "accel_nb.bigmodel.pipelining.pipeline:prepare_pipeline"}
_BIG_TOP = {
    **{name: place for name, place in _BIG.items() if name != "attach_layerwise_casting_hooks"},
    **{name: place for name, place in _DEVICE_MAPS.items() if name != "check_device_map"},
}

_TOP = {
    **_in("accel_nb", "Accelerator"),
    **{name: place for name, place in _RECORDS.items() if name not in ("ProjectConfiguration", "TorchDynamoPlugin")},
    **_in(_STATE, "DistributedType PartialState"),
    **{name: _MEMORY[name] for name in ("find_executable_batch_size",)},
    **{name: _RANDOM[name] for name in ("synchronize_rng_states",)},
    **{name: _IMPORTS[name] for name in ("is_rich_available",)},
    **_LAUNCHERS,
    **_RESUME,
    **_BIG_TOP,
    **_STAGES,
}

_SERVED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        PACKAGE: _TOP,
        f"{PACKAGE}.accelerator": _in("accel_nb", "Accelerator"),
        f"{PACKAGE}.big_modeling": _BIG,
        f"{PACKAGE}.data_loader": {
            **_in("accel_nb.compat.prepared_classes", "DataLoaderDispatcher DataLoaderShard"),
            **_in("accel_nb.data.sampler", "SeedableRandomSampler"),
            **_RESUME,
        },
        f"{PACKAGE}.hooks": {},
        f"{PACKAGE}.inference": _STAGES,
        f"{PACKAGE}.launchers": _LAUNCHERS,
        f"{PACKAGE}.local_sgd": _in("accel_nb.accelerator.local_sgd", "LocalSGD"),
        f"{PACKAGE}.logging": {
            **_in("accel_nb.accelerator.process.logging", "get_logger"),
            "MultiProcessAdapter": "accel_nb.accelerator.process.logging:RankLogger",
        },
        f"{PACKAGE}.memory_utils": _MEMORY,
        f"{PACKAGE}.optimizer": _in("accel_nb.compat.prepared_classes", "AcceleratedOptimizer"),
        f"{PACKAGE}.scheduler": _in("accel_nb.compat.prepared_classes", "AcceleratedScheduler"),
        f"{PACKAGE}.state": {
            **_in(_STATE, "AcceleratorState DistributedType GradientState PartialState"),
            **_in(_HF_UTILS, "is_initialized"),
        },
        f"{PACKAGE}.tracking": _TRACKERS,
        f"{PACKAGE}.utils": {
            **_DATACLASSES, **_NESTED, **_MEMORY, **_RANDOM, **_ENVIRONMENT, **_VERSIONS, **_OTHER, **_IMPORTS,
            **_CONSTANTS, **_TQDM, **_DEVICE_MAPS, **_QUANTIZING,
        },
        f"{PACKAGE}.utils.bnb": _in("accel_nb", "load_and_quantize_model"),
        f"{PACKAGE}.utils.constants": _CONSTANTS,
        f"{PACKAGE}.utils.dataclasses": {**_DATACLASSES, **_in("accel_nb", "BnbQuantizationConfig")},
        f"{PACKAGE}.utils.environment": _ENVIRONMENT,
        f"{PACKAGE}.utils.imports": _IMPORTS,
        f"{PACKAGE}.utils.memory": _MEMORY,
        f"{PACKAGE}.utils.modeling": _DEVICE_MAPS,
        f"{PACKAGE}.utils.operations": _NESTED,
        f"{PACKAGE}.utils.other": _OTHER,
        f"{PACKAGE}.utils.random": _RANDOM,
        f"{PACKAGE}.utils.tqdm": _TQDM,
        f"{PACKAGE}.utils.versions": _VERSIONS,
    }
)  # fmt: skip

MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        module: {**_in("accel_nb.compat.unserved", FOR_IMPORT.get(module, "")), **_SERVED.get(module, {})}
        for module in sorted({*_SERVED, *FOR_IMPORT})
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
