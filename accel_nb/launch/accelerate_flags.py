"""Replacements in ``accel-nb launch`` for the flags of ``accelerate launch``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_LEAVE_OUT = "leave it out"
_SAGEMAKER = "training on SageMaker and on TPU pods is not supported; leave it out"
_MEGATRON = "Megatron-LM is not supported; --strategy fsdp, --tp N and --pp N divide a model among workers"
_MESH = "--tp N, --cp N and --ep N set the dimensions of the mesh; the other workers divide the data"
_TE = "Transformer Engine and MS-AMP are not supported; --precision fp8 uses torchao, with the flags --fp8.*"

EQUIVALENTS: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "--cpus N",
        "debug": "--debug",
        "deepspeed_config_file": "--config FILE; accel-nb config import converts DeepSpeed's file",
        "deepspeed_hostfile": "--nnodes N on each machine, or --slurm",
        "deepspeed_exclusion_filter": "start the command on the machines that train only",
        "deepspeed_inclusion_filter": "start the command on the machines that train only",
        "deepspeed_moe_layer_cls_names": "DeepSpeed finds the layers of experts itself; leave it out",
        "deepspeed_multinode_launcher": "--nnodes N on each machine, or --slurm",
        "downcast_bf16": "--precision bf16",
        "dynamo_backend": "--compile.backend BACKEND",
        "dynamo_mode": "--compile.mode MODE",
        "dynamo_use_dynamic": "--compile.dynamic yes",
        "dynamo_use_fullgraph": "--compile.fullgraph",
        "dynamo_use_regional_compilation": "--compile.regional",
        "enable_cpu_affinity": "call accelerate.utils.set_numa_affinity, or start the command under numactl",
        "env": "set the variables before the command",
        "fp8_backend": "--precision fp8, which uses torchao",
        "fp8_enable_fsdp_float8_all_gather": "--fsdp.float8-gather",
        "fp8_pad_inner_dim": "rows are padded where necessary; leave it out",
        "fsdp_activation_checkpointing": "--activation-checkpointing",
        "fsdp_activation_checkpointing_offload": "--activation-checkpointing, without offloading of activations",
        "fsdp_auto_wrap_policy": "--fsdp.wrap POLICY",
        "fsdp_min_num_params": "--fsdp.min-params N",
        "fsdp_offload_params": "--fsdp.cpu-offload",
        "fsdp_reshard_after_forward": "--fsdp.reshard-after-forward",
        "fsdp_sharding_strategy": "--strategy fsdp shards all; --fsdp.hybrid-shard-size N keeps several replicas",
        "fsdp_transformer_layer_cls_to_wrap": "--fsdp.classes NAMES",
        "fsdp_version": "--strategy fsdp is FSDP2",
        "gpu_ids": "set CUDA_VISIBLE_DEVICES",
        "gradient_accumulation_steps": "--accumulate N",
        "gradient_clipping": "--clip NORM",
        "log_dir": "redirect the output of the command to a file",
        "machine_rank": "--node-rank N",
        "main_process_ip": "--rdzv-endpoint HOST:PORT",
        "main_process_port": "leave it out on one machine, else --rdzv-endpoint HOST:PORT",
        "main_training_function": "a script is run as a program; leave it out",
        "mixed_precision": "--precision no|fp16|bf16|fp8",
        "module": "-m MODULE, after all flags",
        "monitor_interval": "the end of a rank is noticed at once; leave it out",
        "mpirun_hostfile": "start accel-nb launch under mpirun --hostfile FILE",
        "multi_gpu": "leave it out: all GPUs are used, or --gpus N",
        "no_python": "a launch runs Python scripts, modules and notebooks; start other programs with torchrun",
        "num_cpu_threads_per_process": "set OMP_NUM_THREADS",
        "num_machines": "--nnodes N",
        "num_processes": "--gpus N, or --cpus N",
        "offload_optimizer_device": "--deepspeed.offload-optimizer cpu",
        "offload_optimizer_nvme_path": "offloading to disk is not supported; --deepspeed.offload-optimizer cpu",
        "offload_param_device": "--deepspeed.offload-parameters cpu",
        "offload_param_nvme_path": "offloading to disk is not supported; --deepspeed.offload-parameters cpu",
        "quiet": "redirect the error output; a failed rank is one traceback",
        "rdzv_conf": "--rdzv-backend and --rdzv-endpoint",
        "role": _LEAVE_OUT,
        "same_network": "all machines connect to --rdzv-endpoint HOST:PORT; leave it out",
        "tee": "redirect the output of the command to a file",
        "tpu": "--tpus N|all",
        "use_deepspeed": "--strategy deepspeed",
        "use_fsdp": "--strategy fsdp",
        "use_megatron_lm": _MEGATRON,
        "use_parallelism_config": _MESH,
        "zero3_init_flag": "models are sharded after they are built; leave it out",
        "zero3_save_16bit_model": "Accelerator.save_model gathers the weights; leave it out",
        "zero_stage": "--zero-stage N",
        **dict.fromkeys(
            ("aws_access_key_id", "aws_secret_access_key", "no_tpu_cluster", "tpu_cluster", "tpu_use_sudo", "vm"),
            _SAGEMAKER,
        ),
        **dict.fromkeys(
            (
                "fsdp_backward_prefetch", "fsdp_cpu_ram_efficient_loading", "fsdp_forward_prefetch",
                "fsdp_state_dict_type", "fsdp_sync_module_states", "fsdp_use_orig_params",
            ),
            "it has no effect with FSDP2; leave it out",
        ),
    }
)  # fmt: skip
"""Flags by name, with underscores and without the leading dashes."""

_PREFIXES = (("megatron_lm_", _MEGATRON), ("parallelism_config_", _MESH), ("fp8_", _TE))


def equivalent_of(flag: str) -> str | None:
    """Return the replacement of a flag of ``accelerate launch``, or None if it has no such flag."""
    name = flag.replace("-", "_").lstrip("_")
    found = EQUIVALENTS.get(name)
    return found or next((reason for prefix, reason in _PREFIXES if name.startswith(prefix)), None)
