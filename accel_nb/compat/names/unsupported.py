"""Unsupported names of accelerate by module: they can be imported, but not used."""

from __future__ import annotations

from collections.abc import Mapping

PACKAGE = "accelerate"

FOR_IMPORT: Mapping[str, str] = {
    f"{PACKAGE}.checkpointing": ("load_accelerator_state load_custom_state save_accelerator_state save_custom_state"),
    f"{PACKAGE}.inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward",
    f"{PACKAGE}.launchers": "test_launch",
    f"{PACKAGE}.optimizer": "move_to_device patch_optimizer_step",
    f"{PACKAGE}.state": "ThreadLocalSharedDict do_nothing",
    f"{PACKAGE}.utils": (
        "AbstractTrainStep BertTrainStep DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper "
        "FP8RecipeKwargs GPTTrainStep GatheredParameters "
        "MSAMPRecipeKwargs MegatronLMDummyDataLoader MegatronLMDummyScheduler PrepareForLaunch "
        "T5TrainStep TERecipeKwargs add_model_config_to_megatron_parser apply_fp8_autowrap "
        "avg_losses_across_data_parallel_group compile_regions_fsdp2 contextual_fp8_autocast convert_model "
        "convert_model_to_fp8_ao ensure_weights_retied filter_first_and_last_linear_layers fsdp2_apply_ac "
        "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters "
        "has_4bit_bnb_layers has_ao_layers has_transformer_engine_layers install_xla "
        "map_pytorch_optim_to_deepspeed prepare_deepspeed_cmd_env prepare_multi_gpu_env "
        "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu"
    ),
    f"{PACKAGE}.utils.ao": (
        "convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers "
        "find_first_last_linear_layers has_ao_layers"
    ),
    f"{PACKAGE}.utils.bnb": (
        "get_keys_to_not_convert get_parameter_device get_quantized_model_device_map has_4bit_bnb_layers "
        "quantize_and_offload_8bit replace_with_bnb_layers"
    ),
    f"{PACKAGE}.utils.constants": (
        "SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION SAGEMAKER_PYTORCH_VERSION "
        "SAGEMAKER_TRANSFORMERS_VERSION"
    ),
    f"{PACKAGE}.utils.dataclasses": (
        "BaseEnum EnumWithContains FP8RecipeKwargs MSAMPRecipeKwargs TERecipeKwargs "
        "add_model_config_to_megatron_parser parse_bert_config parse_glm4_moe_config "
        "parse_gpt2_config parse_llama_config parse_t5_config"
    ),
    f"{PACKAGE}.utils.deepspeed": (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper map_pytorch_optim_to_deepspeed"
    ),
    f"{PACKAGE}.utils.fsdp_utils": (
        "ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict "
        "fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model fsdp2_switch_optimizer_parameters"
    ),
    f"{PACKAGE}.utils.launch": (
        "PrepareForLaunch env_var_path_add prepare_deepspeed_cmd_env prepare_extend_env_parallelism_config "
        "prepare_multi_gpu_env prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu "
        "setup_fp8_env"
    ),
    f"{PACKAGE}.utils.megatron_lm": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper T5TrainStep "
        "avg_losses_across_data_parallel_group finish_mpu_init gather_across_data_parallel_groups initialize "
        "model_provider_func prepare_data_loader prepare_model_optimizer_scheduler prepare_optimizer "
        "prepare_scheduler"
    ),
    f"{PACKAGE}.utils.modeling": "fallback_allocate",
    f"{PACKAGE}.utils.operations": "GatheredParameters chained_operation is_torch_xpu_tensor verify_operation",
    f"{PACKAGE}.utils.other": "compile_regions_fsdp2",
    f"{PACKAGE}.utils.torch_xla": "install_xla",
    f"{PACKAGE}.utils.transformer_engine": (
        "apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers"
    ),
}
