"""Properties of `Accelerator` that show its options and the position in training."""

from __future__ import annotations

import os

import torch

from accel_nb.accelerator.components import Components
from accel_nb.accelerator.options.plugins import DeepSpeedPlugin, ProjectConfiguration
from accel_nb.accelerator.process_state import AcceleratorState, GradientState, ProcessView
from accel_nb.accelerator.settings import Settings
from accel_nb.accelerator.training.stepper import Stepper
from accel_nb.errors import MisuseError


class StateProperties(ProcessView):
    """Read-only and settable properties with accelerate's names, a base class of `Accelerator`."""

    components: Components
    _settings: Settings
    _stepper: Stepper
    _project: ProjectConfiguration

    @property
    def mixed_precision(self) -> str:
        """The precision in use; never ``auto``."""
        return self.components.strategy.precision.policy.name

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches of each optimizer step; may be set between accumulation windows."""
        return self._stepper.window.size

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MisuseError(f"gradient_accumulation_steps is {steps!r}; it must be a whole number of at least 1")
        self._stepper.set_accumulation(steps)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current (or latest) micro-batch closes its accumulation window, so that optimizers step."""
        return self._stepper.window.syncs_gradients

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the latest optimizer step was skipped because float16 gradients overflowed."""
        return self._stepper.was_skipped

    @property
    def state(self) -> AcceleratorState:
        """A read-only view of this rank, its world and its precision."""
        return AcceleratorState.from_accelerator(
            self, self.mixed_precision, debug=self._settings.options.debug, plugin=self._settings.sharding_plugin
        )

    @property
    def deepspeed_plugin(self) -> DeepSpeedPlugin | None:
        """The plugin that was passed to train with DeepSpeed, or None."""
        return self.state.deepspeed_plugin

    @property
    def gradient_state(self) -> GradientState:
        """The position of the current micro-batch in its accumulation window, as a live view."""
        return GradientState(self._stepper.window, self._settings.options.accumulation)

    @property
    def multi_device(self) -> bool:
        """Whether there is more than one rank, each with its own device."""
        return self.use_distributed

    @property
    def step(self) -> int:
        """Number of completed micro-batches in the open accumulation window."""
        return self._stepper.window.num_pending

    @property
    def scaler(self) -> torch.amp.grad_scaler.GradScaler | None:
        """PyTorch's gradient scaler of fp16; None in other precisions."""
        return self.components.strategy.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether models compute under `torch.autocast`."""
        return self.components.strategy.precision.policy.compute is not None

    @property
    def split_batches(self) -> bool:
        """Whether a prepared loader's batch is the global batch, of all workers together."""
        return self._settings.options.batch == "global"

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether only rank 0 reads loaders; None if that depends on the loader."""
        return self.components.preparer.data.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether all ranks read equally many samples; a new value applies only to loaders that are prepared later."""
        return self.components.preparer.data.even_batches

    @even_batches.setter
    def even_batches(self, is_on: bool) -> None:
        if not isinstance(is_on, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MisuseError(f"even_batches is {is_on!r}; it must be True or False")
        self.components.preparer.data = self.components.preparer.data.model_copy(update={"even_batches": is_on})

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether the order in which loaders shuffle depends on seed and epoch only."""
        return self.components.preparer.data.use_seedable_sampler

    @property
    def non_blocking(self) -> bool | None:
        """Whether the next batch is copied ahead of time; None if that depends on the loader."""
        return self.components.preparer.data.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """Always False: loaders are not replaced by torchdata's."""
        return False

    @property
    def project_dir(self) -> str | os.PathLike[str] | None:
        """Folder of the run, or None."""
        return self._project.project_dir
