"""Unsupported names of accelerate by module: they can be imported, but not used."""

from __future__ import annotations

from collections.abc import Mapping

PACKAGE = "accelerate"

FOR_IMPORT: Mapping[str, str] = {
    PACKAGE: "ParallelismConfig",
    f"{PACKAGE}.checkpointing": ("load_accelerator_state load_custom_state save_accelerator_state save_custom_state"),
    f"{PACKAGE}.data_loader": (
        "BatchSamplerShard DataLoaderAdapter DataLoaderStateMixin IterableDatasetShard SkipBatchSampler "
        "SkipDataLoader get_sampler prepare_data_loader"
    ),
    f"{PACKAGE}.hooks": (
        "AlignDevicesHook CpuOffload LayerwiseCastingHook ModelHook SequentialHook UserCpuOffloadHook "
        "add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks "
        "attach_execution_device_hook remove_hook_from_module remove_hook_from_submodules"
    ),
    f"{PACKAGE}.inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward",
    f"{PACKAGE}.launchers": "test_launch",
    f"{PACKAGE}.optimizer": "move_to_device patch_optimizer_step",
    f"{PACKAGE}.parallelism_config": "ParallelismConfig",
    f"{PACKAGE}.state": "ThreadLocalSharedDict do_nothing",
    f"{PACKAGE}.tracking": "filter_trackers get_available_trackers register_tracker_class",
    f"{PACKAGE}.utils": (
        "AbstractTrainStep BertTrainStep CannotPadNestedTensorWarning ComputeEnvironment CustomDtype "
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DeepSpeedSequenceParallelConfig "
        "DummyOptim DummyScheduler FP8RecipeKwargs GPTTrainStep GatheredParameters HfDeepSpeedConfig KwargsHandler "
        "MITA_PROFILING_AVAILABLE_PYTORCH_VERSION MSAMPRecipeKwargs MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler MegatronLMPlugin OffloadedWeightsLoader PROFILE_PATTERN_NAME ParallelismConfig "
        "PrefixedDataset PrepareForLaunch SAFE_WEIGHTS_PATTERN_NAME SageMakerDistributedType T5TrainStep "
        "TERecipeKwargs TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_LAUNCH_PARAMS TensorInformation "
        "TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin WEIGHTS_PATTERN_NAME "
        "XPU_PROFILING_AVAILABLE_PYTORCH_VERSION add_model_config_to_megatron_parser align_module_device "
        "apply_fp8_autowrap are_libraries_initialized avg_losses_across_data_parallel_group calculate_maximum_sizes "
        "check_cuda_fp8_capability check_cuda_p2p_ib_support check_os_kernel check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device clean_state_dict_for_safetensors compile_regions "
        "compile_regions_deepspeed compile_regions_fsdp2 compute_module_sizes contextual_fp8_autocast "
        "convert_dict_to_env_variables convert_file_size_to_int convert_model convert_model_to_fp8_ao "
        "copy_tensor_to_devices deepspeed_required disable_fsdp_ram_efficient_loading dtype_byte_size "
        "enable_fsdp_ram_efficient_loading ensure_weights_retied extract_submodules_state_dict "
        "filter_first_and_last_linear_layers find_tied_parameters fsdp2_apply_ac fsdp2_canonicalize_names "
        "fsdp2_load_full_state_dict fsdp2_prepare_model fsdp2_switch_optimizer_parameters "
        "get_active_deepspeed_plugin get_balanced_memory get_cpu_distributed_information get_current_device_type "
        "get_data_structure get_fsdp2_grad_scaler get_gpu_info get_grad_scaler get_max_layer_size get_max_memory "
        "get_mixed_precision_context_manager get_model_tp_size get_module_children_bottom_up get_pretty_name "
        "has_4bit_bnb_layers has_ao_layers has_compiled_regions has_offloaded_params has_transformer_engine_layers "
        "id_tensor_storage ignorant_find_batch_size initialize_tensors install_xla is_4bit_bnb_available "
        "is_8bit_bnb_available is_amdsmi_available is_bitsandbytes_multi_backend_available is_habana_gaudi1 "
        "is_import_timer_available is_peft_model is_tensor_information is_torchdata_stateful_dataloader_available "
        "is_transformer_engine_mxfp8_available is_weights_only_available is_xccl_available load load_fsdp_model "
        "load_fsdp_optimizer load_offloaded_weight load_offloaded_weights load_state_dict "
        "map_pytorch_optim_to_deepspeed merge_fsdp_weights model_has_dtensor named_module_tensors "
        "offload_state_dict offload_weight pad_input_tensors prepare_deepspeed_cmd_env prepare_multi_gpu_env "
        "prepare_sagemager_args_inputs prepare_simple_launcher_cmd_env prepare_tpu purge_accelerate_environment "
        "retie_parameters save_fsdp_model save_fsdp_optimizer save_offload_index set_module_tensor_to_device "
        "set_numa_affinity torchao_required write_basic_config"
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
        "BETA_CP_AVAILABLE_PYTORCH_VERSION BETA_SP_AVAILABLE_DEEPSPEED_VERSION BETA_TP_AVAILABLE_PYTORCH_VERSION "
        "BETA_TP_AVAILABLE_TRANSFORMERS_VERSION CUDA_DISTRIBUTED_TYPES DEEPSPEED_MULTINODE_LAUNCHERS "
        "DTENSOR_PYTORCH_VERSION ELASTIC_LOG_LINE_PREFIX_TEMPLATE_PYTORCH_VERSION FSDP2_PYTORCH_VERSION "
        "FSDP2_STATE_DICT_TYPE FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME FSDP_PYTORCH_VERSION "
        "FSDP_SHARDING_STRATEGY FSDP_STATE_DICT_TYPE MITA_PROFILING_AVAILABLE_PYTORCH_VERSION PROFILE_PATTERN_NAME "
        "SAFE_WEIGHTS_PATTERN_NAME SAGEMAKER_PARALLEL_EC2_INSTANCES SAGEMAKER_PYTHON_VERSION "
        "SAGEMAKER_PYTORCH_VERSION SAGEMAKER_TRANSFORMERS_VERSION STR_OPERATION_TO_FUNC "
        "SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING TORCH_DISTRIBUTED_OPERATION_TYPES TORCH_DYNAMO_MODES "
        "TORCH_LAUNCH_PARAMS WEIGHTS_PATTERN_NAME XPU_PROFILING_AVAILABLE_PYTORCH_VERSION"
    ),
    f"{PACKAGE}.utils.dataclasses": (
        "BaseEnum ComputeEnvironment CustomDtype DeepSpeedSequenceParallelConfig EnumWithContains FP8BackendType "
        "FP8RecipeKwargs KwargsHandler MSAMPRecipeKwargs MegatronLMPlugin SageMakerDistributedType TERecipeKwargs "
        "TensorInformation TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin "
        "add_model_config_to_megatron_parser get_module_class_from_name parse_bert_config parse_glm4_moe_config "
        "parse_gpt2_config parse_llama_config parse_t5_config"
    ),
    f"{PACKAGE}.utils.deepspeed": (
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler "
        "HfDeepSpeedConfig get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed"
    ),
    f"{PACKAGE}.utils.environment": (
        "CPUInformation are_libraries_initialized check_cuda_fp8_capability check_cuda_p2p_ib_support "
        "convert_dict_to_env_variables get_cpu_distributed_information get_current_device_type get_driver_version "
        "get_gpu_info override_numa_affinity purge_accelerate_environment set_numa_affinity"
    ),
    f"{PACKAGE}.utils.fsdp_utils": (
        "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading ensure_weights_retied fsdp2_apply_ac "
        "fsdp2_canonicalize_names fsdp2_load_full_state_dict fsdp2_prepare_auto_wrap_policy fsdp2_prepare_model "
        "fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler get_parameters_from_modules load_fsdp_model "
        "load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer"
    ),
    f"{PACKAGE}.utils.imports": (
        "deepspeed_required is_4bit_bnb_available is_8bit_bnb_available is_amdsmi_available "
        "is_bitsandbytes_multi_backend_available is_habana_gaudi1 is_import_timer_available is_numpy_available "
        "is_torch_distributed_available is_torchdata_stateful_dataloader_available is_tqdm_available "
        "is_transformer_engine_mxfp8_available is_weights_only_available is_xccl_available torchao_required"
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
    f"{PACKAGE}.utils.modeling": (
        "align_module_device calculate_maximum_sizes check_device_same check_tied_parameters_in_config "
        "check_tied_parameters_on_same_device clean_device_map compute_module_sizes "
        "compute_module_total_buffer_size convert_file_size_to_int dtype_byte_size fallback_allocate "
        "find_tied_parameters get_balanced_memory get_grad_scaler get_max_layer_size get_max_memory "
        "get_mixed_precision_context_manager get_module_leaves get_module_size_with_ties get_non_persistent_buffers "
        "get_state_dict_from_offload get_state_dict_offloaded_model has_offloaded_params id_tensor_storage "
        "is_peft_model load_offloaded_weights load_state_dict named_module_tensors retie_parameters "
        "set_module_tensor_to_device"
    ),
    f"{PACKAGE}.utils.offload": (
        "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight "
        "offload_state_dict offload_weight save_offload_index"
    ),
    f"{PACKAGE}.utils.operations": (
        "CannotPadNestedTensorWarning ConvertOutputsToFp32 DistributedOperationException GatheredParameters "
        "chained_operation copy_tensor_to_devices gather_tensor_shape get_data_structure get_shape "
        "ignorant_find_batch_size initialize_tensors is_tensor_information is_torch_xpu_tensor pad_input_tensors "
        "verify_operation"
    ),
    f"{PACKAGE}.utils.other": (
        "check_os_kernel clean_state_dict_for_safetensors compile_regions compile_regions_deepspeed "
        "compile_regions_fsdp2 get_free_port get_model_tp_size get_module_children_bottom_up get_pretty_name "
        "has_compiled_regions has_repeated_blocks is_repeated_blocks load model_has_dtensor"
    ),
    f"{PACKAGE}.utils.torch_xla": "install_xla",
    f"{PACKAGE}.utils.transformer_engine": (
        "apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers"
    ),
}
