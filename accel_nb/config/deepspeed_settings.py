"""The settings of DeepSpeed, generated from the options of a run."""

from __future__ import annotations

import sys
from typing import Any

from accel_nb.config.sections import DeepspeedOptions


def settings_for(options: DeepspeedOptions, num_elements: int | None, *, pins_memory: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a model of ``num_elements`` trainable elements, or of any size if None.

    It leaves out accumulation, clipping, loss scaling and schedules, which accel_nb does for all strategies. No bucket
    is larger than the model, since DeepSpeed allocates whole buckets.
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
