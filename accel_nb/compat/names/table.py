"""The modules and names of accelerate that can be imported: supported ones, and ones that raise an error on use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accel_nb.compat.names.supported import SUPPORTED, places_in
from accel_nb.compat.names.unsupported import FOR_IMPORT

UNSUPPORTED = frozenset(name for names in FOR_IMPORT.values() for name in names.split())
"""Unsupported names that libraries such as transformers and peft import; using one raises an error."""

_PLACEHOLDERS = "accel_nb.compat.names.placeholders"

MODULES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        module: {
            **places_in(_PLACEHOLDERS, FOR_IMPORT.get(module, "")),
            **SUPPORTED.get(module, {}),
        }
        for module in sorted({*SUPPORTED, *FOR_IMPORT})
    }
)
"""For each importable module its names, each with the place ``module:attribute`` of the object."""

_NAMES_BY_REASON = {
    "checkpoints are saved and loaded by Accelerator.save_state and load_state": (
        "checkpointing load_accelerator_state load_custom_state save_accelerator_state save_custom_state"
    ),
    "Megatron-LM's own models are not supported; MegatronLMPlugin divides any model, and strategy='fsdp' too": (
        "megatron_lm AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine "
        "MegatronLMDummyDataLoader MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper "
        "T5TrainStep add_model_config_to_megatron_parser avg_losses_across_data_parallel_group finish_mpu_init "
        "gather_across_data_parallel_groups initialize model_provider_func parse_bert_config parse_glm4_moe_config "
        "parse_gpt2_config parse_llama_config parse_t5_config prepare_model_optimizer_scheduler prepare_optimizer "
        "prepare_scheduler"
    ),
    "DeepSpeed's ZeRO is chosen by DeepSpeedPlugin or strategy='deepspeed', and prepare builds its engine": (
        "deepspeed DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper GatheredParameters "
        "map_pytorch_optim_to_deepspeed"
    ),
    "FSDP2 is chosen by FullyShardedDataParallelPlugin or strategy='fsdp', and prepare shards the model in place": (
        "fsdp_utils compile_regions_fsdp2 ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names "
        "fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model "
        "fsdp2_switch_optimizer_parameters"
    ),
    "fp8 is torchao's here, chosen by mixed_precision='fp8' and AORecipeKwargs": (
        "FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs ao transformer_engine apply_fp8_autowrap "
        "contextual_fp8_autocast convert_model convert_model_to_fp8_ao filter_first_and_last_linear_layers "
        "filter_linear_layers find_first_last_linear_layers has_ao_layers has_transformer_engine_layers"
    ),
    "bitsandbytes' layers are made by load_and_quantize_model": (
        "bnb get_keys_to_not_convert get_parameter_device get_quantized_model_device_map has_4bit_bnb_layers "
        "quantize_and_offload_8bit replace_with_bnb_layers"
    ),
    "pipelines are built by prepare_pippy": ("build_pipeline find_pippy_batch_size generate_device_map pippy_forward"),
    "device maps are planned by infer_auto_device_map": "fallback_allocate",
    "it is an internal part of accelerate's launcher; accel-nb launch and notebook_launcher start processes": (
        "PrepareForLaunch env_var_path_add prepare_deepspeed_cmd_env prepare_extend_env_parallelism_config "
        "prepare_multi_gpu_env prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu "
        "setup_fp8_env test_launch"
    ),
    "optimizers are prepared in place, by Accelerator.prepare": "move_to_device patch_optimizer_step",
    "collectives check shapes with the option debug": "chained_operation verify_operation",
    "XLA is selected by strategy='xla'; no name is imported for it": "torch_xla install_xla",
    "Intel's XPUs are not supported": "is_torch_xpu_tensor",
    "it is an internal base class of accelerate's enumerations and states": (
        "BaseEnum EnumWithContains ThreadLocalSharedDict do_nothing"
    ),
    "accelerate's command line is there if accelerate is installed too; here it is accel-nb": "commands",
    "SageMaker is not supported": (
        "SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION "
        "SAGEMAKER_TRANSFORMERS_VERSION"
    ),
    "it is a helper of tests, which is there if accelerate is installed too": "test_utils",
}

UNSUPPORTED_REASONS: Mapping[str, str] = MappingProxyType(
    {name: reason for reason, names in _NAMES_BY_REASON.items() for name in names.split()}
)
"""The reasons why names are not supported."""


def reason_for(path: str) -> str:
    """Return why a module or name, given with dots, is not supported."""
    found = (UNSUPPORTED_REASONS[part] for part in reversed(path.split(".")) if part in UNSUPPORTED_REASONS)
    return next(found, "it has no counterpart here; docs/migration.md lists what there is")
