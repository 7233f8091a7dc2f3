"""The private names of torch that accel_nb uses, and the versions of torch that they were checked against.

torch may rename or remove a private name in any version. On a version that was not checked, the uses that have a
``fallback`` call public functions instead; the others still use the private names. This module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from types import MappingProxyType

CHECKED_VERSIONS = ("2.9", "2.10", "2.11", "2.13", "2.15")
"""The versions of torch, major and minor, that the tests of accel_nb run with."""


@dataclass(frozen=True, slots=True)
class PrivateUse:
    """Private names of torch that one feature uses.

    ``modules`` are the files that use them, below ``accel_nb``. ``fallback`` describes the replacement on an unchecked
    version; None if torch has no public alternative. ``differences`` describes differences between versions of torch
    that the code handles. ``versions`` are those that the names were checked on.
    """

    feature: str
    modules: tuple[str, ...]
    names: tuple[str, ...]
    fallback: str | None = None
    differences: str | None = None
    versions: tuple[str, ...] = CHECKED_VERSIONS


PRIVATE_USES = (
    PrivateUse(
        "ddp.forward",
        ("strategies/ddp/lean_ddp.py",),
        (
            "torch.autograd._profiler_enabled",
            "torch.autograd._unsafe_preserve_version_counter",
            "DistributedDataParallel._active_ddp_module",
            "DistributedDataParallel._assign_modules_buffers",
            "DistributedDataParallel._ddp_params_and_buffers_to_ignore",
            "DistributedDataParallel._delay_all_reduce_all_params",
            "DistributedDataParallel._distributed_broadcast_coalesced",
            "DistributedDataParallel._lazy_init_ran",
            "DistributedDataParallel._sync_buffers",
            "DistributedDataParallel._use_python_reducer",
            "Reducer._rebuild_buckets",
        ),
        fallback="strategy ddp runs torch's own forward pass of DistributedDataParallel, which is slower for small "
        "models and refuses overlapping buffers",
        differences="from 2.13 on torch copies buffers without increasing their versions; LeanDdp always does so",
    ),
    PrivateUse(
        "ddp.builtin_hook",
        ("strategies/ddp/comm_hooks.py",),
        (
            "torch._C._distributed_c10d.BuiltinCommHookType",
            "DistributedDataParallel._register_builtin_comm_hook",
        ),
        fallback="strategy ddp averages gradients by torch's allreduce_hook, which is written in Python",
    ),
    PrivateUse(
        "ddp.finalized",
        ("strategies/ddp/strategy.py",),
        ("DistributedDataParallel._check_reducer_finalized",),
    ),
    PrivateUse(
        "ddp.outputs",
        ("strategies/ddp/reached_parameters.py",),
        ("torch.nn.parallel.distributed._find_tensors",),
    ),
    PrivateUse(
        "foreach",
        ("strategies/base.py", "strategies/fsdp/float8_gather.py"),
        ("torch._foreach_mul_", "torch._foreach_norm"),
        fallback="gradients are multiplied one at a time",
    ),
    PrivateUse(
        "dtensor.local",
        ("runtime/distributed/sharded.py",),
        ("DTensor._local_tensor",),
        fallback="parts of sharded tensors are read by DTensor.to_local",
    ),
    PrivateUse(
        "fsdp.parameter_groups",
        ("strategies/fsdp/parameter_groups.py",),
        (
            "FSDPParamGroup._module_to_pre_load_state_dict_hook_handle",
            "FSDPParamGroup._module_to_pre_save_state_dict_hook_handle",
            "FSDPParamGroup._to_sharded",
            "FSDPParam._module_info",
            "FSDPParam._unsharded_param",
            "FSDPState._fsdp_param_group",
            "FSDPState._fsdp_param_groups",
            "Module._parameters",
        ),
    ),
    PrivateUse(
        "fsdp.visible_shards",
        ("strategies/fsdp/visible_shards.py",),
        ("FSDPParam._unsharded_param", "Module._parameters"),
    ),
    PrivateUse(
        "fsdp.sharded_model",
        ("strategies/fsdp/sharded_model.py", "strategies/fsdp/model_refusal.py"),
        (
            "torch.distributed._composable.contract",
            "torch.distributed._composable_state._get_module_state",
            "torch.distributed._composable_state._module_state_mapping",
            "torch.distributed.distributed_c10d._world",
            "torch.distributed.fsdp._fully_shard._fully_shard.cls_to_fsdp_cls",
            "FSDPParam._param_fqn",
            "FSDPParam._unsharded_param",
            "FSDPParamGroup._reduce_scatter_process_group",
            "FSDPParamGroup._to_sharded",
            "FSDPParamGroup._training_state",
            "FSDPState._lazy_init",
            "FSDPState._state_ctx",
            "FSDPState._training_state",
            "Module._forward_hooks",
            "Module._forward_pre_hooks",
            "Module._fsdp_use_orig_params",
            "Module._is_fsdp_managed_module",
            "Module._load_state_dict_post_hooks",
            "Module._load_state_dict_pre_hooks",
            "Module._parameters",
            "Module._state_dict_pre_hooks",
            "DTensor._is_param",
            "Parameter._fsdp_orig_uid",
            "Tensor._backward_hooks",
            "Tensor._post_accumulate_grad_hooks",
            "Tensor._version",
        ),
        differences="up to 2.11 a unit has one group of parameters, under the name _fsdp_param_group",
    ),
    PrivateUse(
        "sharded_arithmetic",
        ("runtime/distributed/sharded_arithmetic.py", "accelerator/plain_cells/replacements/sharded_code.py"),
        (
            "torch._C.DisableTorchFunctionSubclass",
            "torch.nn.utils.stateless._functional_call",
            "Module._parameters",
            "Tensor._base",
        ),
    ),
    PrivateUse(
        "gathered_copies",
        ("runtime/distributed/gathered_copies.py",),
        ("torch._C._storage_Use_Count", "Tensor._version", "UntypedStorage._cdata"),
        fallback="full tensors that a cell under strategy fsdp has gathered for views stay in memory until it ends",
    ),
    PrivateUse(
        "fsdp.float8_gather",
        ("strategies/fsdp/float8_gather.py",),
        (
            "torch._C._current_graph_task_id",
            "FSDPParam._init_extensions",
            "FSDPParam._module_info",
            "FSDPParam._sharded_local_tensor",
            "FSDPParam._sharded_param_data",
        ),
    ),
    PrivateUse(
        "sharded_layers",
        (
            "strategies/block_calls.py",
            "strategies/expert_parallel/divided_experts.py",
            "strategies/tensor_parallel/divided_layers.py",
        ),
        (
            "Module._backward_hooks",
            "Module._backward_pre_hooks",
            "Module._forward_hooks",
            "Module._forward_pre_hooks",
            "Module._parameters",
        ),
    ),
    PrivateUse(
        "pipeline",
        (
            "runtime/distributed/sharded.py",
            "strategies/pipeline/chain_probe.py",
            "strategies/pipeline/pipeline.py",
            "strategies/pipeline/stage_plan.py",
            "strategies/pipeline/undone_calls.py",
        ),
        (
            "Module._buffers",
            "Tensor._version",
            "torch.distributed.tensor.placement_types._StridedShard",
            "torch.nn.modules.batchnorm._BatchNorm",
            "torch.utils._python_dispatch._disable_current_modes",
        ),
    ),
    PrivateUse(
        "fsdp.meta_weights",
        ("strategies/fsdp/meta_weights.py", "strategies/fsdp/new_parts.py"),
        ("Module._apply", "Module._buffers", "Module._parameters"),
    ),
    PrivateUse(
        "deepspeed.engine",
        (
            "strategies/deepspeed/engine.py",
            "strategies/deepspeed/flat_state.py",
            "strategies/deepspeed/state_shard.py",
            "strategies/deepspeed/whole_states.py",
            "strategies/deepspeed/plain_modules.py",
        ),
        (
            "Module._forward_hooks",
            "Module._forward_pre_hooks",
            "Module._modules",
            "Module._parameters",
            "Tensor._post_accumulate_grad_hooks",
            "Tensor._version",
            "torch._C.DisableTorchFunctionSubclass",
        ),
    ),
    PrivateUse(
        "state_dict.metadata",
        (
            "accelerator/state/state_matching.py",
            "accelerator/state/training_state.py",
            "strategies/fsdp/sharded_state.py",
        ),
        ("state_dict._metadata",),
    ),
    PrivateUse(
        "optimizer.called",
        (
            "accelerator/training/optimizer_proxy.py",
            "pool/sync/objects/user_attributes.py",
        ),
        (
            "Optimizer._opt_called",
            "Optimizer.step._wrapped_by_lr_sched",
        ),
    ),
    PrivateUse(
        "schedulers",
        (
            "accelerator/training/first_step_checks.py",
            "accelerator/training/lr_control.py",
            "accelerator/training/lr_preview.py",
        ),
        (
            "ChainedScheduler._schedulers",
            "CyclicLR._scale_fn_custom",
            "LRScheduler._get_closed_form_lr",
            "LRScheduler._get_lr_called_within_step",
            "LRScheduler._last_lr",
            "SequentialLR._milestones",
            "Optimizer.step._wrapped_by_lr_sched",
        ),
    ),
    PrivateUse(
        "autograd.saved",
        ("accelerator/plain_cells/loss_proof/trace.py", "accelerator/training/loss_classification.py"),
        (
            "Node._saved_alpha",
            "Node._saved_ignore_index",
            "Node._saved_mask",
            "Node._saved_other",
            "Node._saved_reduction",
            "Node._saved_self",
            "Node._saved_self_sym_sizes",
            "Node._saved_target",
            "Node._saved_total_weight",
            "Node._saved_weight",
        ),
    ),
    PrivateUse(
        "ddp.loss",
        ("accelerator/training/loss_classification.py",),
        ("torch.nn.parallel.distributed._DDPSink",),
    ),
    PrivateUse("autograd.raw_saved", ("telemetry/memory_attribution.py",), ("Node._raw_saved_",)),
    PrivateUse(
        "autograd.input_metadata",
        ("accelerator/plain_cells/loss_proof/contrastive_check.py",),
        ("Node._input_metadata",),
    ),
    PrivateUse(
        "hooks",
        (
            "accelerator/plain_cells/detection/model_hooks.py",
            "accelerator/model_division/model_structure.py",
            "pool/sync/objects/user_hooks.py",
            "strategies/deepspeed/inner_optimizer.py",
        ),
        (
            "Module._backward_hooks",
            "Module._backward_pre_hooks",
            "Optimizer._optimizer_load_state_dict_post_hooks",
            "Optimizer._optimizer_load_state_dict_pre_hooks",
            "Optimizer._optimizer_state_dict_post_hooks",
            "Optimizer._optimizer_state_dict_pre_hooks",
            "Optimizer._optimizer_step_post_hooks",
            "Optimizer._optimizer_step_pre_hooks",
            "Tensor._backward_hooks",
            "Tensor._post_accumulate_grad_hooks",
        ),
    ),
    PrivateUse(
        "module_hooks",
        ("pool/sync/objects/module_hooks.py", "pool/sync/objects/shared_ids.py"),
        (
            "Module._backward_hooks",
            "Module._backward_pre_hooks",
            "Module._buffers",
            "Module._forward_hooks",
            "Module._forward_hooks_always_called",
            "Module._forward_hooks_with_kwargs",
            "Module._forward_pre_hooks",
            "Module._forward_pre_hooks_with_kwargs",
            "Module._is_full_backward_hook",
            "Module._load_state_dict_post_hooks",
            "Module._load_state_dict_pre_hooks",
            "Module._modules",
            "Module._parameters",
            "Module._state_dict_hooks",
            "Module._state_dict_pre_hooks",
            "torch.nn.modules.module._WrappedHook",
        ),
    ),
    PrivateUse(
        "dispatch_modes",
        (
            "accelerator/plain_cells/loss_proof/trace.py",
            "bigmodel/planning/forward_cost.py",
            "forecast/measurement.py",
        ),
        (
            "torch.utils._python_dispatch.TorchDispatchMode",
            "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
            "Tensor._base",
        ),
    ),
    PrivateUse(
        "fake_tensors",
        ("bigmodel/planning/forward_cost.py", "forecast/measurement.py"),
        ("torch._subclasses.fake_tensor", "UntypedStorage._cdata"),
    ),
    PrivateUse(
        "aten",
        ("accelerator/plain_cells/loss_proof/sample_rules.py", "forecast/measurement.py"),
        (
            "OpOverload._schema",
            "aten._adaptive_avg_pool2d",
            "aten._adaptive_avg_pool3d",
            "aten._cdist_forward",
            "aten._local_scalar_dense",
            "aten._log_softmax",
            "aten._native_batch_norm_legit",
            "aten._native_batch_norm_legit_no_training",
            "aten._prelu_kernel",
            "aten._reshape_alias",
            "aten._scaled_dot_product_attention_math",
            "aten._scaled_dot_product_cudnn_attention",
            "aten._scaled_dot_product_efficient_attention",
            "aten._scaled_dot_product_flash_attention",
            "aten._scaled_dot_product_flash_attention_for_cpu",
            "aten._softmax",
            "aten._to_copy",
            "aten._unsafe_view",
        ),
    ),
    PrivateUse(
        "collective_count",
        ("runtime/distributed/process_group.py",),
        ("ProcessGroup._get_sequence_number_for_group",),
    ),
    PrivateUse(
        "torchscript",
        ("accelerator/plain_cells/replacements/torchscript.py",),
        ("torch.jit._builtins._get_builtin_table", "torch.jit.script._frames_up"),
    ),
    PrivateUse(
        "compile",
        (
            "accelerator/plain_cells/files/cell_files.py",
            "accelerator/model_division/divided_calls.py",
            "accelerator/prepare/compiling.py",
            "compat/models/model_parts.py",
            "compat/models/module_tensors.py",
            "notebook/session/engines.py",
            "notebook/worker/program.py",
            "strategies/deepspeed/limits.py",
            "strategies/fsdp/divided_dimensions.py",
            "strategies/fsdp/model_refusal.py",
        ),
        ("torch._dynamo", "torch._inductor", "Module._compiled_call_impl", "OptimizedModule._orig_mod"),
    ),
    PrivateUse(
        "compile.skip",
        ("accelerator/model_division/uncompiled_code.py",),
        ("torch._dynamo.trace_rules.add",),
        fallback="torch.compile in a plain cell does not compile models under model division",
    ),
    PrivateUse(
        "model_division",
        (
            "accelerator/model_division/divided_calls.py",
            "accelerator/model_division/model_structure.py",
            "accelerator/model_division/module_state.py",
            "accelerator/model_division/tensor_writes.py",
            "accelerator/model_division/overlapping_outputs.py",
            "accelerator/model_division/random_reads.py",
            "accelerator/model_division/reachable_state.py",
            "accelerator/model_division/related_outputs.py",
            "accelerator/model_division/row_layout.py",
            "accelerator/model_division/row_random.py",
            "accelerator/model_division/value_reads.py",
            "accelerator/plain_cells/loop_division.py",
            "accelerator/plain_cells/detection/model_hooks.py",
        ),
        (
            "torch.nn.modules.batchnorm._BatchNorm",
            "torch.nn.modules.dropout._DropoutNd",
            "torch.nn.utils.parametrize._cache",
            "torch.utils._python_dispatch",
            "torch.ops.aten._cudnn_rnn",
            "torch.ops.aten._efficient_attention",
            "torch.ops.aten._flash_attention",
            "torch.ops.aten._pack_padded_sequence",
            "torch.ops.aten._scaled_dot_product",
            "torch.ops.aten._thnn",
            "Module._backward_hooks",
            "Module._buffers",
            "Module._forward_hooks",
            "Module._forward_pre_hooks",
            "Module._modules",
            "Module._parameters",
            "OpOverload._schema",
            "Tensor._base",
            "Tensor._version",
        ),
    ),
    PrivateUse(
        "gradients_in_buckets",
        ("accelerator/plain_cells/autoprepare.py", "accelerator/plain_cells/replacements/gradient_data.py"),
        ("Tensor._is_view", "Module._parameters"),
    ),
    PrivateUse(
        "accelerate_compatibility",
        ("compat/models/module_tensors.py", "compat/models/offloaded_files.py", "compat/parallelism.py"),
        ("DeviceMesh._flatten", "Module._buffers", "Module._non_persistent_buffers_set", "Module._parameters"),
    ),
    PrivateUse(
        "call_observers",
        ("accelerator/model_division/call_observers.py",),
        (
            "torch._C._autograd._top_saved_tensors_default_hooks",
            "torch.nn.modules.module._global_backward_hooks",
            "torch.nn.modules.module._global_backward_pre_hooks",
            "torch.nn.modules.module._global_forward_hooks",
            "torch.nn.modules.module._global_forward_pre_hooks",
            "torch.overrides._get_current_function_mode_stack",
            "torch.utils._device.DeviceContext",
            "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        ),
    ),
    PrivateUse(
        "base_layers",
        (
            "accelerator/plain_cells/loss_proof/loss_check.py",
            "accelerator/plain_cells/loss_proof/trace.py",
            "accelerator/prepare/preparer.py",
            "bigmodel/offload/dispatch.py",
            "bigmodel/offload/layerwise_casting.py",
            "bigmodel/pipelining/micro_batches.py",
        ),
        (
            "torch.nn.modules.batchnorm._BatchNorm",
            "torch.nn.modules.batchnorm._NormBase",
            "torch.nn.modules.conv._ConvNd",
            "torch.nn.modules.dropout._DropoutNd",
        ),
    ),
    PrivateUse(
        "module.tensors",
        (
            "accelerator/plain_cells/loss_proof/loss_check.py",
            "accelerator/plain_cells/detection/model_hooks.py",
            "bigmodel/loading/load.py",
            "bigmodel/offload/dispatch.py",
            "bigmodel/offload/layerwise_casting.py",
            "bigmodel/planning/module_tree.py",
            "runtime/tensors/tied.py",
        ),
        ("Module._buffers", "Module._parameters"),
    ),
    PrivateUse(
        "transforms",
        ("runtime/tensors/transforms.py",),
        ("torch._C._functorch", "torch.autograd.forward_ad._current_level"),
    ),
    PrivateUse(
        "tensor.version",
        (
            "bigmodel/offload/weight_prefetch.py",
            "runtime/tensors/versions.py",
            "strategies/local_gradients.py",
        ),
        ("Tensor._version",),
    ),
    PrivateUse(
        "checkpoint.dcp_metadata",
        ("checkpoint/dcp_format.py",),
        (
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
            "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
            "torch.serialization._get_layout",
        ),
        differences="the names stand in pickles of every version of torch, and are compared as text only",
    ),
    PrivateUse(
        "loader.iterator",
        ("data/loader.py", "data/persistent_workers.py", "pool/sync/reductions/loader_state.py"),
        (
            "DataLoader._get_iterator",
            "DataLoader._iterator",
            "_BaseDataLoaderIter._index_sampler",
            "_BaseDataLoaderIter._reset",
        ),
    ),
    PrivateUse(
        "custom_operators",
        ("pool/sync/reductions/custom_operators.py",),
        (
            "CustomOpDef._abstract_fn",
            "CustomOpDef._autocast_dtype",
            "CustomOpDef._backend_fns",
            "CustomOpDef._backward_fn",
            "CustomOpDef._init_fn",
            "CustomOpDef._qualname",
            "CustomOpDef._schema",
            "CustomOpDef._setup_context_fn",
            "CustomOpDef._torch_dispatch_fns",
            "CustomOpDef._vmap_fn",
        ),
    ),
    PrivateUse(
        "reachable_values",
        ("notebook/cells/reachable_values.py",),
        (
            "Module._modules",
            "Module._parameters",
            "Tensor._backward_hooks",
            "Tensor._post_accumulate_grad_hooks",
        ),
    ),
    PrivateUse(
        "reference_detection",
        ("pool/sync/references.py",),
        (
            "Module._buffers",
            "Module._modules",
            "Module._parameters",
            "Tensor._backward_hooks",
            "Tensor._post_accumulate_grad_hooks",
        ),
    ),
    PrivateUse(
        "process_settings",
        ("notebook/session/process_settings.py",),
        ("torch._tensor_str.PRINT_OPTS", "torch.hub._hub_dir", "Distribution._validate_args"),
    ),
    PrivateUse(
        "change_detection",
        ("pool/sync/change_detection.py", "pool/sync/objects/user_attributes.py"),
        (
            "DTensor._is_param",
            "Module._backward_hooks",
            "Module._backward_pre_hooks",
            "Module._buffers",
            "Module._compiled_call_impl",
            "Module._forward_hooks",
            "Module._forward_hooks_always_called",
            "Module._forward_hooks_with_kwargs",
            "Module._forward_pre_hooks",
            "Module._forward_pre_hooks_with_kwargs",
            "Module._is_full_backward_hook",
            "Module._load_state_dict_post_hooks",
            "Module._load_state_dict_pre_hooks",
            "Module._modules",
            "Module._non_persistent_buffers_set",
            "Module._parameters",
            "Module._state_dict_hooks",
            "Module._state_dict_pre_hooks",
            "Tensor._version",
        ),
    ),
    PrivateUse(
        "module_paths",
        ("runtime/tensors/module_paths.py",),
        ("Module._buffers", "Module._modules", "Module._parameters"),
    ),
    PrivateUse(
        "module_parts",
        ("pool/sync/objects/module_parts.py",),
        ("Module._buffers", "Module._modules", "Module._non_persistent_buffers_set", "Module._parameters"),
    ),
    PrivateUse(
        "process_group",
        (
            "runtime/distributed/last_collective.py",
            "runtime/distributed/process_group.py",
            "runtime/distributed/shared_group.py",
        ),
        (
            "torch._C._distributed_c10d._dump_fr_trace_json",
            "torch.distributed.distributed_c10d._abort_process_group",
            "torch.distributed.distributed_c10d._get_default_store",
            "torch.distributed.distributed_c10d._new_process_group_helper",
            "torch.distributed.distributed_c10d._set_pg_timeout",
            "ProcessGroup._get_backend",
            "Backend.Options._timeout",
        ),
        differences="where torch has no _dump_fr_trace_json, or records no collectives of gloo (up to 2.10), the last "
        "collective is not reported",
    ),
)
"""Every private name of torch in accel_nb, by feature; tests/architecture compares the table with the code."""

_BY_FEATURE: Mapping[str, PrivateUse] = MappingProxyType({use.feature: use for use in PRIVATE_USES})


@cache
def torch_version() -> str | None:
    """Return major and minor version of the installed torch; None if it is not installed."""
    try:
        # The metadata of a package is a file that takes 20 ms to parse.
        version = getattr(sys.modules.get("torch"), "__version__", None) or metadata.version("torch")
        return ".".join(version.split(".")[:2])
    except metadata.PackageNotFoundError:
        return None


def is_checked(feature: str) -> bool:
    """Return whether the private names of a feature were checked against the installed torch."""
    return torch_version() in _BY_FEATURE[feature].versions


def fallbacks() -> list[str]:
    """Return descriptions of the features that use public functions because the installed torch was not checked."""
    return [use.fallback for use in PRIVATE_USES if use.fallback is not None and not is_checked(use.feature)]


def why_unchecked() -> str | None:
    """Describe the consequences of an installed torch that was not checked.

    None if it was checked, or torch is absent.
    """
    version, changed = torch_version(), fallbacks()
    if version is None or not changed:
        return None
    return (
        f"torch {version} is not checked: the private names of torch that accel_nb uses were checked on "
        f"{', '.join(CHECKED_VERSIONS)}. Therefore {'; '.join(changed)}. The other private names are still "
        "used: if a cell fails inside of accel_nb, install a checked version"
    )
