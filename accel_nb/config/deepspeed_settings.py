"""The settings that DeepSpeed gets: generated from the options of a run, which are their only source."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class DeepspeedOptions(Protocol):
    """The section of the configuration that the strategy reads."""

    @property
    def zero_stage(self) -> Literal[1, 2, 3]:
        """What is divided: optimizer state; gradients too; parameters too."""
        ...

    @property
    def offload_optimizer(self) -> Literal["no", "cpu"]:
        """Where optimizer state lies."""
        ...

    @property
    def offload_parameters(self) -> Literal["no", "cpu"]:
        """Where divided parameters lie; stage 3."""
        ...

    @property
    def bucket_size(self) -> int:
        """How many elements are averaged, or gathered, in one message."""
        ...

    @property
    def prefetch_size(self) -> int:
        """How many elements are gathered ahead of their module; stage 3."""
        ...

    @property
    def persistent_size(self) -> int:
        """Parameters of at most so many elements stay whole between steps; stage 3."""
        ...

    @property
    def overlap_comm(self) -> bool:
        """Average gradients while others are computed."""
        ...

    @property
    def weights(self) -> str | None:
        """Safetensors that models on the meta device are filled from; stage 3."""
        ...

    @property
    def allow_untested_optimizer(self) -> bool:
        """Take an optimizer that is not known to treat each element by itself."""
        ...


@dataclass(frozen=True, slots=True)
class DefaultDeepspeedOptions:
    """The defaults, for use without a configuration."""

    zero_stage: Literal[1, 2, 3] = 2
    offload_optimizer: Literal["no", "cpu"] = "no"
    offload_parameters: Literal["no", "cpu"] = "no"
    bucket_size: int = 500_000_000
    prefetch_size: int = 50_000_000
    persistent_size: int = 100_000
    overlap_comm: bool = False
    weights: str | None = None
    allow_untested_optimizer: bool = False


def settings_for(options: DeepspeedOptions, num_elements: int | None, *, pins_memory: bool) -> dict[str, Any]:
    """Return DeepSpeed's dictionary for a model of ``num_elements`` trainable elements; None: for one of any size.

    Windows, clipping, loss scaling and schedules are not in it: they are the same for all strategies, and not
    DeepSpeed's. No bucket is larger than the model, since DeepSpeed allocates it whole.
    """
    stage = options.zero_stage
    limit = sys.maxsize if num_elements is None else num_elements + num_elements % 2
    bucket = max(2, min(options.bucket_size, limit))
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": options.overlap_comm,
        "reduce_scatter": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if options.offload_optimizer != "no":
        zero["offload_optimizer"] = {"device": options.offload_optimizer, "pin_memory": pins_memory}
    elif stage < 3:
        zero["compute_grad_norm"] = False
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = min(options.prefetch_size, limit)
        zero["stage3_param_persistence_threshold"] = options.persistent_size
        if options.offload_parameters != "no":
            zero["offload_param"] = {"device": options.offload_parameters, "pin_memory": pins_memory}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
