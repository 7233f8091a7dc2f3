"""Methods of `Accelerator` that save and load checkpoints, models, and plain values (numbers, text, containers)."""

from __future__ import annotations

import os
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from accel_nb.accelerator.components import Components
from accel_nb.accelerator.process_state import ProcessView
from accel_nb.accelerator.state.training_state import HookHandle, LoadHook, LoadReport, SaveHook
from accel_nb.checkpoint.export import WeightWriter, drop_tied_duplicates, save_value
from accel_nb.checkpoint.full_tensors import gather_weights
from accel_nb.checkpoint.shared_errors import run_on_main
from accel_nb.data.loader import SkippedBatchesLoader, skip_first_batches
from accel_nb.errors import MisuseError
from accel_nb.runtime.process.user_code import warn_at_user_line
from accel_nb.runtime.tensors.tied import find_tied
from accel_nb.strategies.base import Bundle

T = TypeVar("T")


class CheckpointMethods(ProcessView):
    """Methods that save and load, a base class of `Accelerator`."""

    components: Components

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
    ) -> str:
        """Save the complete state of the training, and return its folder or URL; every rank must call.

        Args:
            output_dir: The checkpoint's own folder or URL; an existing checkpoint there is replaced. By default
                ``step_N`` in ``checkpoint.dir``, where checkpoints of other runs are not replaced.
            safe_serialization: Ignored: tensors are always stored as safetensors.
            blocking: Whether to return when the checkpoint is complete. With False the call returns when the tensors
                are copied, and the checkpoint is written in the background.

        A checkpoint is either complete or does not exist. Raises `CheckpointError`, on every rank, if a value cannot be
        stored or written, or if the previous background save has failed.
        """
        return self.components.state.save(output_dir, blocking=blocking)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        *,
        strict: bool = True,
        layout: Literal["accel_nb", "accelerate"] = "accel_nb",
    ) -> LoadReport:
        """Load a checkpoint, or the newest complete one of a folder, into the prepared objects; every rank must call.

        The world size may differ from the world size at the save. The whole checkpoint is verified before anything is
        loaded. If a part does not match, nothing is loaded, unless ``strict`` is False. A prepared loader's next
        iteration continues where the checkpoint was saved: it yields the remaining samples of that epoch, each once.

        ``layout="accelerate"`` reads a folder that accelerate's ``save_state`` has written: weights, optimizers,
        schedulers, loss scale, registered objects and random states. From its pickled files only tensors and plain
        values are read. That layout contains no position in the data, so loaders start their epoch again.

        Raises `NoCheckpoint`, `CorruptCheckpoint` and `CheckpointError`.
        """
        if layout == "accel_nb":
            return self.components.state.load(input_dir, strict=strict)
        if layout != "accelerate" or input_dir is None:
            raise MisuseError(
                f"load_state was given the layout {layout!r} and the folder {input_dir!r}: a layout is 'accel_nb' or "
                "'accelerate', and the latter needs a folder"
            )
        return self.components.state.load_accelerate_folder(input_dir, strict=strict)

    def skip_first_batches(self, dataloader: DataLoader[T], num_batches: int = 0) -> SkippedBatchesLoader:
        """Return an iterable over a prepared loader that skips its first batches on this rank, without reading them.

        Not needed after `load_state`, which restores the loader's position. Every rank must call.
        """
        return skip_first_batches(dataloader, num_batches)

    def wait_for_checkpoint(self) -> None:
        """Wait until the background save is complete; every rank must call. Raises `CheckpointError`."""
        self.components.state.wait()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects with ``state_dict`` and ``load_state_dict`` to checkpoints, in the order of registration."""
        self.components.state.register(objects)

    def register_save_state_pre_hook(self, hook: SaveHook) -> HookHandle:
        """Call ``hook(models, weights, url)`` before each save; entries that it removes from ``weights`` are not saved.

        ``url`` is the folder that is being written; for an object store it is the checkpoint's final URL. Files that
        the hook writes there become part of the checkpoint; hooks of `register_load_state_pre_hook` can read them.
        """
        return self.components.state.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: LoadHook) -> HookHandle:
        """Call ``hook(models, url)`` before each load; models that it removes from ``models`` are not loaded."""
        return self.components.state.add_load_hook(hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return a copy of a model's full state dict; every rank must call if the model is sharded.

        ``unwrap`` is ignored: keys are always the names in the model before `prepare`. Inside of a `LocalSGD` block
        the weights are this rank's own, and a warning says so.
        """
        self._warn_own_weights(model)
        state = self.components.strategy.read_state(Bundle((model,)))["models"][0]
        return dict(gather_weights(state, self._comm))

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "5GB",
        safe_serialization: bool = True,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a model's weights as safetensors that other libraries load; rank 0 writes.

        With ``dtype``, such as ``torch.bfloat16``, weights are rounded to it. If the model is sharded, every rank must
        call; rank 0 then holds the tensors of one file (``max_shard_size``) in memory, and the other ranks one full
        tensor at a time. If it is not sharded, the other ranks do not wait: call `wait_for_everyone` before they read
        the files. Inside of a `LocalSGD` block these are rank 0's own weights, and a warning says so.

        Raises `MisuseError` for ``safe_serialization=False``, which would write pickles.
        """
        if not safe_serialization:
            raise MisuseError(
                "save_model(safe_serialization=False) is not supported: it would write pickles. Leave it out for "
                "safetensors, or write torch.save(accelerator.get_state_dict(model), PATH) on the main process"
            )
        is_sharded = self.components.strategy.capabilities.shards_params
        if not is_sharded and not self.is_main_process:
            return
        self._warn_own_weights(model)
        files = WeightWriter(save_directory, max_shard_size, dtype)
        state = self.components.strategy.read_state(Bundle((model,)), copied=False)["models"][0]
        for name, value in gather_weights(drop_tied_duplicates(state, find_tied(model)), self._comm):
            if self.is_main_process:
                files.add(name, value)
        if is_sharded:
            run_on_main(self._comm, files.finish)
        else:
            files.finish()

    def _warn_own_weights(self, model: nn.Module) -> None:
        if self.is_main_process and self.components.stepper.has_own_weights(model):
            warn_at_user_line(
                "these are the weights of one worker, since LocalSGD has not averaged them yet: make this call after "
                "the block, or call save_state(), which averages them first"
            )

    def save(self, obj: Any, path: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write plain values and tensors on rank 0, in the format of the file name's suffix.

        The suffixes are ``.safetensors`` and ``.json``; with any other suffix ``torch.load(weights_only=True)`` can
        read the file. ``safe_serialization`` writes safetensors under any suffix. Every rank may call, or rank 0 alone.
        The other ranks do not wait: call `wait_for_everyone` before they read the file.
        """
        if self.is_main_process:
            save_value(obj, path, as_safetensors=safe_serialization)
