"""Plugins with the names of `accelerate` that choose a mesh: Megatron-LM's degrees, and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_nb.errors import ConfigError
from accel_nb.runtime.process.environment import get_variable

_PREFIX = "MEGATRON_LM_"
_DEGREES = {
    "tp_degree": "mesh.tp",
    "pp_degree": "mesh.pp",
    "context_parallel_size": "mesh.cp",
    "expert_model_parallel_size": "mesh.ep",
}
_WITHOUT_COUNTERPART = (
    "use_custom_fsdp overlap_cpu_optimizer_d2h_h2d no_load_optim eod_mask_loss no_save_optim optimizer_cpu_offload "
    "use_precision_aware_optimizer decoder_last_pipeline_num_layers recompute_granularity recompute_method "
    "recompute_num_layers attention_backend attention_dropout hidden_dropout attention_softmax_in_fp32 "
    "expert_tensor_parallel_size calculate_per_token_loss use_rotary_position_embeddings sequence_parallelism "
    "pipeline_model_parallel_split_rank num_layers_per_virtual_pipeline_stage is_train_batch_min train_iters "
    "train_samples weight_decay_incr_style start_weight_decay end_weight_decay lr_decay_style lr_decay_iters "
    "lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction min_lr consumed_samples no_wd_decay_cond "
    "scale_lr_cond lr_mult megatron_dataset_flag seq_length encoder_seq_length decoder_seq_length tensorboard_dir "
    "set_all_logging_options eval_iters eval_interval return_logits custom_train_step_class custom_train_step_kwargs "
    "custom_model_provider_function custom_prepare_model_function custom_megatron_datasets_provider_function "
    "custom_get_batch_function custom_loss_function other_megatron_args"
)


class MegatronLMPlugin:
    """A mesh under Megatron-LM's names. For a field that is not given the variable ``MEGATRON_LM_<FIELD>`` is read.

    Args:
        tp_degree: Number of processes that compute each layer together (``mesh.tp``).
        pp_degree: Number of stages (``mesh.pp``).
        num_micro_batches: Number of parts of a batch that pass through the stages (``mesh.micro_batches``).
        gradient_clipping: Largest norm of the gradients (``clip``); by default 1.0.
        recompute_activations: Recompute activations in the backward pass (``activation_checkpointing``).
        use_distributed_optimizer: Divide optimizer state among the processes: with ``strategy="fsdp"``, which divides
            gradients and weights too.
        context_parallel_size: Number of processes that compute each sequence together (``mesh.cp``).
        expert_model_parallel_size: Number of processes that hold different experts (``mesh.ep``).
        others: Other fields of accelerate's class; `as_options` raises an error for them.
    """

    def __init__(
        self,
        tp_degree: int | None = None,
        pp_degree: int | None = None,
        *,
        num_micro_batches: int | None = None,
        gradient_clipping: float | None = None,
        recompute_activations: bool | None = None,
        use_distributed_optimizer: bool | None = None,
        context_parallel_size: int | None = None,
        expert_model_parallel_size: int | None = None,
        **others: Any,
    ) -> None:
        unknown = sorted(others.keys() - set(_WITHOUT_COUNTERPART.split()))
        if unknown:
            raise TypeError(f"MegatronLMPlugin has no field {unknown[0]!r}")
        self.tp_degree = _read("tp_degree", tp_degree, 1)
        self.pp_degree = _read("pp_degree", pp_degree, 1)
        self.num_micro_batches = _read("num_micro_batches", num_micro_batches, 1)
        self.gradient_clipping = _read("gradient_clipping", gradient_clipping, 1.0)
        self.recompute_activations = _read("recompute_activations", recompute_activations, False)
        self.use_distributed_optimizer = _read("use_distributed_optimizer", use_distributed_optimizer, False)
        self.context_parallel_size = _read("context_parallel_size", context_parallel_size, 1)
        self.expert_model_parallel_size = _read("expert_model_parallel_size", expert_model_parallel_size, 1)
        self.others = {name: value for name, value in others.items() if value is not None and value is not False}

    def as_options(self) -> dict[str, Any]:
        """Return the options with the same meaning; raise `ConfigError` for fields without a counterpart."""
        if self.others:
            raise ConfigError(
                f"{', '.join(sorted(self.others))} from MegatronLMPlugin(...): what belongs to the models and loops of "
                "Megatron-LM has no counterpart; leave it out"
            )
        options = {option: getattr(self, name) for name, option in _DEGREES.items() if getattr(self, name) > 1}
        if self.pp_degree > 1:
            options["mesh.micro_batches"] = self.num_micro_batches
        if self.gradient_clipping:
            options["clip"] = self.gradient_clipping
        if self.recompute_activations:
            options["activation_checkpointing"] = True
        if self.use_distributed_optimizer:
            options["strategy"] = "fsdp"
        return options


def _read(name: str, given: Any, default: Any) -> Any:
    """Return the given value, else the environment variable in the default's type, else the default.

    Raises `ConfigError` for a variable that is no number.
    """
    if given is not None:
        return given
    text = get_variable(f"{_PREFIX}{name.upper()}", None)
    if text is None:
        return default
    if isinstance(default, bool):
        return text.lower() in ("1", "true", "yes")
    try:
        return type(default)(text)
    except ValueError:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ConfigError(f"the variable {_PREFIX}{name.upper()} is {text!r}; it must be {kind}") from None


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism.

    Args:
        tp_size: Number of processes that compute each layer together (``mesh.tp``).
    """

    tp_size: int = 1

    def as_options(self) -> dict[str, Any]:
        """Return the option with the same meaning."""
        return {"mesh.tp": self.tp_size} if self.tp_size > 1 else {}
