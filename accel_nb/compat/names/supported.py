"""The supported names of accelerate by module, each with the place of the object that provides it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel_nb.compat.names.unsupported import PACKAGE

_PLUGINS = "accel_nb.accelerator.options.plugins"
_MESHES = "accel_nb.compat.parallelism"
_OWN_PLUGINS = "accel_nb.compat.plugins"
_OWN_STATE = "accel_nb.compat.states"
_STATE = "accel_nb.accelerator.process_state"
_OPERATIONS = "accel_nb.accelerator.process.operations"
_HF_UTILS = "accel_nb.compat.hf_utils"
_AVAILABLE = "accel_nb.compat.names.availability"


def places_in(module: str, names: str) -> dict[str, str]:
    """Return the place of each name in one module."""
    return {name: f"{module}:{name}" for name in names.split()}


_RECORDS = {
    **places_in("accel_nb.accelerator.options.mesh_plugins", "MegatronLMPlugin TorchTensorParallelPlugin"),
    **places_in(
        _PLUGINS,
        "AORecipeKwargs AutocastKwargs GradScalerKwargs InitProcessGroupKwargs",
    ),
    **places_in("accel_nb.compat.kwargs_handlers", "DistributedDataParallelKwargs ProfileKwargs"),
    **places_in(
        _OWN_PLUGINS,
        "DDPCommunicationHookType DataLoaderConfiguration FullyShardedDataParallelPlugin GradientAccumulationPlugin "
        "ProjectConfiguration TorchDynamoPlugin",
    ),
    **places_in("accel_nb.compat.deepspeed.plugin", "DeepSpeedPlugin"),
}
_DEEPSPEED = places_in(
    "accel_nb.compat.deepspeed.config", "DummyOptim DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin"
)
_DATACLASSES = {
    **_RECORDS,
    **places_in(_STATE, "DistributedType"),
    **places_in(_HF_UTILS, "DynamoBackend LoggerType PrecisionType RNGType"),
    **places_in(_OWN_PLUGINS, "ComputeEnvironment CustomDtype SageMakerDistributedType"),
    **places_in(
        _MESHES,
        "DeepSpeedSequenceParallelConfig TorchContextParallelConfig TorchTensorParallelConfig",
    ),
    "KwargsHandler": "accel_nb.accelerator.options.kwargs_handler:KwargsHandler",
    "TensorInformation": "accel_nb.compat.data.nested_data:TensorInformation",
}
_DATACLASSES_MODULE = {
    **_DATACLASSES,
    **places_in(_OWN_PLUGINS, "FP8BackendType"),
    "get_module_class_from_name": "accel_nb.compat.models.model_parts:get_module_class_from_name",
}
_COLLECTIVES = places_in(
    _OPERATIONS,
    "broadcast_object_list convert_to_fp32 find_batch_size find_device listify send_to_device",
)
_NESTED = {
    **_COLLECTIVES,
    **places_in(_HF_UTILS, "honor_type is_namedtuple is_torch_tensor"),
    **places_in(
        "accel_nb.compat.data.nested_data",
        "CannotPadNestedTensorWarning broadcast concatenate convert_outputs_to_fp32 copy_tensor_to_devices gather "
        "gather_object get_data_structure ignorant_find_batch_size initialize_tensors is_tensor_information "
        "pad_across_processes pad_input_tensors recursively_apply reduce slice_tensors",
    ),
}
_NESTED_MODULE = {
    **_NESTED,
    **places_in(
        "accel_nb.compat.data.nested_data",
        "ConvertOutputsToFp32 DistributedOperationException TensorInformation gather_tensor_shape get_shape",
    ),
}
_MEMORY = {
    "clear_device_cache": f"{_HF_UTILS}:clear_device_cache",
    "find_executable_batch_size": "accel_nb.compat.batch_size:find_executable_batch_size",
    "release_memory": "accel_nb.accelerator.process.memory_release:release_memory",
    "should_reduce_batch_size": f"{_HF_UTILS}:should_reduce_batch_size",
}
_RANDOM = {
    **places_in("accel_nb.accelerator.process.seeding", "set_seed"),
    "synchronize_rng_state": f"{_HF_UTILS}:synchronize_rng_state",
    "synchronize_rng_states": f"{_HF_UTILS}:synchronize_all_rng_states",
}
_MACHINE = "accel_nb.compat.machine"
_ENVIRONMENT = {
    **places_in(
        _MACHINE,
        "are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support convert_dict_to_env_variables "
        "get_cpu_distributed_information get_current_device_type get_gpu_info purge_accelerate_environment "
        "set_numa_affinity",
    ),
    **places_in("accel_nb.runtime.process.environment", "clear_environment patch_environment"),
    **places_in(_HF_UTILS, "get_int_from_env parse_choice_from_env parse_flag_from_env str_to_bool"),
}
_VERSIONS = places_in(_HF_UTILS, "compare_versions is_torch_version")
_OTHER = {
    **places_in(_OPERATIONS, "wait_for_everyone"),
    **places_in("accel_nb.compat.launchers", "write_basic_config"),
    **places_in(_HF_UTILS, "save"),
    **places_in(_HF_UTILS, "convert_bytes is_port_in_use merge_dicts"),
    **places_in(
        "accel_nb.compat.models.model_parts",
        "clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed extract_model_from_parallel "
        "get_model_tp_size get_module_children_bottom_up get_pretty_name has_compiled_regions is_compiled_module load "
        "model_has_dtensor",
    ),
    **places_in(_MACHINE, "check_os_kernel"),
    **places_in(_HF_UTILS, "recursive_getattr"),
}
_IMPORTS = places_in(
    _AVAILABLE,
    "is_aim_available is_bf16_available is_bnb_available is_boto3_available is_clearml_available is_comet_ml_available "
    "is_cuda_available is_datasets_available is_deepspeed_available is_dvclive_available is_fp16_available "
    "is_fp8_available is_hpu_available is_ipex_available is_lomo_available is_matplotlib_available "
    "is_megatron_lm_available is_mlflow_available is_mlu_available is_mps_available is_msamp_available "
    "is_musa_available is_neuron_available is_npu_available is_pandas_available is_peft_available is_pippy_available "
    "is_pynvml_available is_pytest_available is_rich_available is_rocm_available is_sagemaker_available "
    "is_schedulefree_available is_sdaa_available is_swanlab_available is_tensorboard_available is_timm_available "
    "is_torch_xla_available is_torchao_available is_torchdata_available is_torchvision_available is_trackio_available "
    "is_transformer_engine_available is_transformers_available is_triton_available is_wandb_available is_xpu_available "
    "is_4bit_bnb_available is_8bit_bnb_available is_amdsmi_available is_bitsandbytes_multi_backend_available "
    "is_habana_gaudi1 is_import_timer_available is_torchdata_stateful_dataloader_available "
    "is_transformer_engine_mxfp8_available is_weights_only_available is_xccl_available deepspeed_required "
    "torchao_required",
)
_IMPORTS_MODULE = {
    **_IMPORTS,
    **places_in(_AVAILABLE, "is_numpy_available is_torch_distributed_available is_tqdm_available"),
    "_is_package_available": f"{_AVAILABLE}:is_package_available",
}
_CONSTANTS_MODULE = places_in(
    "accel_nb.compat.constants",
    "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION "
    "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION CUDA_DISTRIBUTED_TYPES DEEPSPEED_MULTINODE_LAUNCHERS "
    "DTENSOR_PYTORCH_VERSION ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION "
    "FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME FSDP_PYTORCH_VERSION "
    "FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MODEL_NAME OPTIMIZER_NAME "
    "PROFILE_PATTERN_NAME RNG_STATE_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME "
    "SAFE_WEIGHTS_PATTERN_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME STR_OPERATION_TO_FUNC "
    "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_DYNAMO_MODES TORCH_LAUNCH_PARAMS "
    "WEIGHTS_INDEX_NAME WEIGHTS_NAME WEIGHTS_PATTERN_NAME XPU_PROFILING_AVAILABLE_PYTORCH_VERSION",
)
_CONSTANTS = {
    name: place
    for name, place in _CONSTANTS_MODULE.items()
    if not name.startswith(("BETA", "CUDA", "DEEPSPEED", "DTENSOR", "ELASTIC", "FSDP", "STR", "SUPPORTED", "TORCH_DYN"))
}
_TENSORS = places_in(
    "accel_nb.compat.models.module_tensors",
    "align_module_device check_device_same check_tied_parameters_in_config check_tied_parameters_on_same_device "
    "dtype_byte_size get_non_persistent_buffers has_offloaded_params id_tensor_storage is_peft_model "
    "named_module_tensors retie_parameters set_module_tensor_to_device",
)
_SIZES = {
    "_get_proper_dtype": "accel_nb.bigmodel.planning.sizes:parse_dtype",  # the tests of diffusers import it
    **places_in("accel_nb.bigmodel.planning.sizes", "compute_module_sizes find_tied_parameters"),
    **places_in(
        "accel_nb.compat.models.module_sizes",
        "calculate_maximum_sizes clean_device_map compute_module_total_buffer_size convert_file_size_to_int "
        "get_balanced_memory get_max_layer_size get_max_memory get_module_leaves get_module_size_with_ties",
    ),
}
_FILES = "accel_nb.compat.models.offloaded_files"
_OFFLOAD = places_in(
    _FILES,
    "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight offload_state_dict "
    "offload_weight save_offload_index",
)
_STATE_DICTS = places_in(
    _FILES, "get_state_dict_from_offload get_state_dict_offloaded_model load_offloaded_weights load_state_dict"
)
_PRECISION = places_in("accel_nb.compat.models.model_parts", "get_grad_scaler get_mixed_precision_context_manager")
_SHARDED = {
    **places_in(
        "accel_nb.compat.models.sharded_files",
        "load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer",
    ),
    **places_in("accel_nb.compat.models.model_parts", "get_fsdp2_grad_scaler"),
    **places_in(_MACHINE, "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading"),
}
_MODELING = {**_PRECISION, **_TENSORS, **_SIZES, **_STATE_DICTS}
_INNER_OF_MODELING = frozenset(
    {
        *("_get_proper_dtype", "check_device_same", "clean_device_map", "compute_module_total_buffer_size"),
        *("get_module_leaves", "get_module_size_with_ties", "get_non_persistent_buffers"),
        *("get_state_dict_from_offload", "get_state_dict_offloaded_model"),
    }
)
_UTILS_OF_MODELING = {name: place for name, place in _MODELING.items() if name not in _INNER_OF_MODELING}
_HOOKS = {
    **places_in(
        "accel_nb.compat.models.model_hooks",
        "ModelHook SequentialHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules",
    ),
    **places_in(
        "accel_nb.compat.models.align_hooks",
        "AlignDevicesHook CpuOffload LayerwiseCastingHook UserCpuOffloadHook attach_align_device_hook "
        "attach_align_device_hook_on_blocks attach_execution_device_hook",
    ),
}
_LOADERS = {
    **places_in("accel_nb.compat.data.batch_shards", "BatchSamplerShard IterableDatasetShard"),
    **places_in(
        "accel_nb.compat.data.data_loaders",
        "DataLoaderAdapter DataLoaderDispatcher DataLoaderShard DataLoaderStateMixin SeedableRandomSampler "
        "SkipBatchSampler SkipDataLoader get_sampler prepare_data_loader skip_first_batches",
    ),
}

_TQDM = places_in("accel_nb.accelerator.process.progress", "tqdm")

_LAUNCHERS = places_in("accel_nb.compat.launchers", "debug_launcher notebook_launcher")
_RESUME = places_in("accel_nb.compat.data.data_loaders", "skip_first_batches")
_TRACKERS = {
    **places_in("accel_nb", "GeneralTracker"),
    **places_in(
        "accel_nb.compat.trackers",
        "LOGGER_TYPE_TO_CLASS filter_trackers get_available_trackers register_tracker_class",
    ),
    **places_in(_HF_UTILS, "on_main_process"),
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
_OWN_BIG = "accel_nb.compat.models.big_models"
_BIG = {
    **places_in(
        "accel_nb",
        "attach_layerwise_casting_hooks cpu_offload_with_hook init_empty_weights init_on_device",
    ),
    **places_in(_OWN_BIG, "cpu_offload disk_offload dispatch_model load_checkpoint_and_dispatch"),
}
_DEVICE_MAPS = {
    **places_in("accel_nb.compat.models.device_maps", "infer_auto_device_map"),
    **places_in(_OWN_BIG, "check_device_map load_checkpoint_in_model"),
}
_QUANTIZING = places_in("accel_nb", "BnbQuantizationConfig load_and_quantize_model")
_STAGES = {"prepare_pippy": "accel_nb.bigmodel.pipelining.pipeline:prepare_pipeline"}
_BIG_TOP = {
    **{name: place for name, place in _BIG.items() if name != "attach_layerwise_casting_hooks"},
    **{name: place for name, place in _DEVICE_MAPS.items() if name != "check_device_map"},
}

_TOP = {
    **places_in("accel_nb.compat.accelerator", "Accelerator"),
    **{name: place for name, place in _RECORDS.items() if name not in ("ProjectConfiguration", "TorchDynamoPlugin")},
    **places_in(_STATE, "DistributedType"),
    **places_in(_OWN_STATE, "PartialState"),
    **{name: _MEMORY[name] for name in ("find_executable_batch_size",)},
    **{name: _RANDOM[name] for name in ("synchronize_rng_states",)},
    **{name: _IMPORTS[name] for name in ("is_rich_available",)},
    **_LAUNCHERS,
    **places_in(_MESHES, "ParallelismConfig"),
    **_RESUME,
    **_BIG_TOP,
    **_STAGES,
}

SUPPORTED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        PACKAGE: _TOP,
        f"{PACKAGE}.accelerator": {**places_in("accel_nb.compat.accelerator", "Accelerator"), **_RECORDS, **_IMPORTS},
        f"{PACKAGE}.big_modeling": _BIG,
        f"{PACKAGE}.commands": {},
        f"{PACKAGE}.commands.launch": places_in(
            "accel_nb.launch.accelerate_command", "launch_command launch_command_parser main"
        ),
        f"{PACKAGE}.commands.merge": places_in("accel_nb.cli.merge_weights", "merge_command merge_command_parser"),
        f"{PACKAGE}.data_loader": _LOADERS,
        f"{PACKAGE}.hooks": _HOOKS,
        f"{PACKAGE}.inference": _STAGES,
        f"{PACKAGE}.launchers": _LAUNCHERS,
        f"{PACKAGE}.local_sgd": places_in("accel_nb.accelerator.local_sgd", "LocalSGD"),
        f"{PACKAGE}.logging": places_in("accel_nb.compat.logging", "MultiProcessAdapter get_logger"),
        f"{PACKAGE}.memory_utils": _MEMORY,
        f"{PACKAGE}.optimizer": places_in("accel_nb.compat.prepared_classes", "AcceleratedOptimizer"),
        f"{PACKAGE}.parallelism_config": places_in(_MESHES, "ParallelismConfig"),
        f"{PACKAGE}.scheduler": places_in("accel_nb.compat.prepared_classes", "AcceleratedScheduler"),
        f"{PACKAGE}.state": {
            **places_in(_STATE, "DistributedType"),
            **places_in(_OWN_STATE, "AcceleratorState GradientState PartialState"),
            **places_in(_HF_UTILS, "is_initialized"),
        },
        f"{PACKAGE}.tracking": _TRACKERS,
        f"{PACKAGE}.utils": {
            **_DATACLASSES, **_NESTED, **_MEMORY, **_RANDOM, **_ENVIRONMENT, **_VERSIONS, **_OTHER, **_IMPORTS,
            **_CONSTANTS, **_TQDM, **_DEVICE_MAPS, **_QUANTIZING, **_UTILS_OF_MODELING, **_OFFLOAD,
            **places_in(_MESHES, "ParallelismConfig"), **_SHARDED, **_DEEPSPEED,
        },
        f"{PACKAGE}.utils.bnb": places_in("accel_nb", "load_and_quantize_model"),
        f"{PACKAGE}.utils.constants": _CONSTANTS_MODULE,
        f"{PACKAGE}.utils.deepspeed": _DEEPSPEED,
        f"{PACKAGE}.utils.dataclasses": {**_DATACLASSES_MODULE, **places_in("accel_nb", "BnbQuantizationConfig")},
        f"{PACKAGE}.utils.environment": {
            **_ENVIRONMENT,
            **places_in(_MACHINE, "CPUInformation get_driver_version override_numa_affinity"),
        },
        f"{PACKAGE}.utils.fsdp_utils": {
            **_SHARDED,
            **places_in("accel_nb.compat.models.model_parts", "get_parameters_from_modules"),
        },
        f"{PACKAGE}.utils.imports": _IMPORTS_MODULE,
        f"{PACKAGE}.utils.memory": _MEMORY,
        f"{PACKAGE}.utils.modeling": {**_DEVICE_MAPS, **_MODELING},
        f"{PACKAGE}.utils.offload": _OFFLOAD,
        f"{PACKAGE}.utils.operations": _NESTED_MODULE,
        f"{PACKAGE}.utils.other": {
            **_OTHER,
            **places_in("accel_nb.compat.models.model_parts", "has_repeated_blocks is_repeated_blocks"),
            **places_in(_MACHINE, "get_free_port"),
        },
        f"{PACKAGE}.utils.random": _RANDOM,
        f"{PACKAGE}.utils.tqdm": _TQDM,
        f"{PACKAGE}.utils.versions": _VERSIONS,
    }
)  # fmt: skip
"""For each module its supported names, each with the place ``module:attribute`` of the object."""
