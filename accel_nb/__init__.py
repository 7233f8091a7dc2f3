"""Write the notebook cell as for one device; run it on all of them; watch it live; keep the trained model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accel_nb.accelerator import Accelerator
    from accel_nb.accelerator.local_sgd import LocalSGD
    from accel_nb.accelerator.options.fsdp_plugin import FullyShardedDataParallelPlugin
    from accel_nb.accelerator.options.plugins import (
        AORecipeKwargs,
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from accel_nb.accelerator.process.logging import get_logger
    from accel_nb.accelerator.process.memory_release import release_memory
    from accel_nb.accelerator.process.progress import tqdm
    from accel_nb.accelerator.process.seeding import set_seed, synchronize_rng_states
    from accel_nb.accelerator.process_state import (
        AcceleratorState,
        DistributedType,
        GradientState,
        PartialState,
    )
    from accel_nb.accelerator.training.batch_size import find_executable_batch_size
    from accel_nb.bigmodel.loading.bnb import BnbQuantizationConfig, load_and_quantize_model
    from accel_nb.bigmodel.loading.from_checkpoint import load
    from accel_nb.bigmodel.loading.load import load_checkpoint_and_dispatch, load_checkpoint_in_model
    from accel_nb.bigmodel.loading.quantized_files import quantize_checkpoint, save_quantized
    from accel_nb.bigmodel.meta import init_empty_weights, init_on_device
    from accel_nb.bigmodel.offload.dispatch import cpu_offload, disk_offload, dispatch_model
    from accel_nb.bigmodel.offload.layerwise_casting import attach_layerwise_casting_hooks
    from accel_nb.bigmodel.offload.sequential_offload import cpu_offload_with_hook
    from accel_nb.bigmodel.pipelining.micro_batches import pipeline_devices
    from accel_nb.bigmodel.pipelining.pipeline import prepare_pipeline
    from accel_nb.bigmodel.planning.cost_model import Pace
    from accel_nb.bigmodel.planning.device_map import check_device_map, infer_auto_device_map
    from accel_nb.bigmodel.quantization.kernels import Quantization
    from accel_nb.bigmodel.quantization.quantize import quantize_model, report_quantization
    from accel_nb.data.loader import skip_first_batches
    from accel_nb.notebook.launcher import debug_launcher, notebook_launcher
    from accel_nb.telemetry.trackers import GeneralTracker

    __version__: str

__all__ = [
    "AORecipeKwargs",
    "Accelerator",
    "AcceleratorState",
    "AutocastKwargs",
    "BnbQuantizationConfig",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GeneralTracker",
    "GradScalerKwargs",
    "DeepSpeedPlugin",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "Pace",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "Quantization",
    "TorchDynamoPlugin",
    "__version__",
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "get_logger",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_ipython_extension",
    "pipeline_devices",
    "prepare_pipeline",
    "quantize_checkpoint",
    "quantize_model",
    "notebook_launcher",
    "release_memory",
    "report_quantization",
    "save_quantized",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
    "tqdm",
    "unload_ipython_extension",
]

_HOMES = {
    "AORecipeKwargs": "accel_nb.accelerator.options.plugins",
    "Accelerator": "accel_nb.accelerator",
    "AcceleratorState": "accel_nb.accelerator.process_state",
    "AutocastKwargs": "accel_nb.accelerator.options.plugins",
    "BnbQuantizationConfig": "accel_nb.bigmodel.loading.bnb",
    "DDPCommunicationHookType": "accel_nb.accelerator.options.plugins",
    "DataLoaderConfiguration": "accel_nb.accelerator.options.plugins",
    "DistributedDataParallelKwargs": "accel_nb.accelerator.options.plugins",
    "DistributedType": "accel_nb.accelerator.process_state",
    "FullyShardedDataParallelPlugin": "accel_nb.accelerator.options.fsdp_plugin",
    "GeneralTracker": "accel_nb.telemetry.trackers",
    "GradScalerKwargs": "accel_nb.accelerator.options.plugins",
    "DeepSpeedPlugin": "accel_nb.accelerator.options.plugins",
    "GradientAccumulationPlugin": "accel_nb.accelerator.options.plugins",
    "GradientState": "accel_nb.accelerator.process_state",
    "InitProcessGroupKwargs": "accel_nb.accelerator.options.plugins",
    "LocalSGD": "accel_nb.accelerator.local_sgd",
    "Pace": "accel_nb.bigmodel.planning.cost_model",
    "PartialState": "accel_nb.accelerator.process_state",
    "ProfileKwargs": "accel_nb.accelerator.options.plugins",
    "ProjectConfiguration": "accel_nb.accelerator.options.plugins",
    "Quantization": "accel_nb.bigmodel.quantization.kernels",
    "TorchDynamoPlugin": "accel_nb.accelerator.options.plugins",
    "attach_layerwise_casting_hooks": "accel_nb.bigmodel.offload.layerwise_casting",
    "check_device_map": "accel_nb.bigmodel.planning.device_map",
    "cpu_offload": "accel_nb.bigmodel.offload.dispatch",
    "cpu_offload_with_hook": "accel_nb.bigmodel.offload.sequential_offload",
    "debug_launcher": "accel_nb.notebook.launcher",
    "disk_offload": "accel_nb.bigmodel.offload.dispatch",
    "dispatch_model": "accel_nb.bigmodel.offload.dispatch",
    "find_executable_batch_size": "accel_nb.accelerator.training.batch_size",
    "get_logger": "accel_nb.accelerator.process.logging",
    "infer_auto_device_map": "accel_nb.bigmodel.planning.device_map",
    "init_empty_weights": "accel_nb.bigmodel.meta",
    "init_on_device": "accel_nb.bigmodel.meta",
    "load": "accel_nb.bigmodel.loading.from_checkpoint",
    "load_and_quantize_model": "accel_nb.bigmodel.loading.bnb",
    "load_checkpoint_and_dispatch": "accel_nb.bigmodel.loading.load",
    "load_checkpoint_in_model": "accel_nb.bigmodel.loading.load",
    "pipeline_devices": "accel_nb.bigmodel.pipelining.micro_batches",
    "prepare_pipeline": "accel_nb.bigmodel.pipelining.pipeline",
    "quantize_checkpoint": "accel_nb.bigmodel.loading.quantized_files",
    "quantize_model": "accel_nb.bigmodel.quantization.quantize",
    "notebook_launcher": "accel_nb.notebook.launcher",
    "release_memory": "accel_nb.accelerator.process.memory_release",
    "report_quantization": "accel_nb.bigmodel.quantization.quantize",
    "save_quantized": "accel_nb.bigmodel.loading.quantized_files",
    "set_seed": "accel_nb.accelerator.process.seeding",
    "skip_first_batches": "accel_nb.data.loader",
    "synchronize_rng_states": "accel_nb.accelerator.process.seeding",
    "tqdm": "accel_nb.accelerator.process.progress",
}


def __getattr__(name: str) -> Any:
    """Import torch and packaging only when something that needs them is asked for."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    if name == "compat":
        from importlib import import_module

        return import_module("accel_nb.compat")
    if name == "__version__":
        from importlib.metadata import version

        return version("accel_nb")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; a clean process starts importing torch in the background. Returns in milliseconds."""
    from accel_nb.notebook.magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """End the workers and take the magics away."""
    from accel_nb.notebook.magics import unload

    unload(shell)


def _jupyter_labextension_paths() -> list[dict[str, str]]:  # pyright: ignore[reportUnusedFunction]
    """Tell JupyterLab where the built sidebar lies."""
    return [{"src": "labextension", "dest": "accel-nb"}]
