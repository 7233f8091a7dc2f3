"""TensorBoard, through PyTorch's `SummaryWriter`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accel_nb.telemetry.trackers.base import GeneralTracker
from accel_nb.telemetry.trackers.pictures import numbered, pictures


class TensorBoardTracker(GeneralTracker):
    """Writes to the folder ``LOGGING_DIR/RUN``; an existing run of that name is continued."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        """Set the folder; ``kwargs`` are passed to ``SummaryWriter``."""
        super().__init__()
        self.run_id = run_name
        self.folder = Path(logging_dir) / run_name
        self._options = kwargs
        self._writer: Any = None

    @property
    def tracker(self) -> Any:
        """The ``SummaryWriter``."""
        return self._writer

    writer = tracker  # the name in Hugging Face Accelerate

    def resume(self, run_id: str, step: int) -> None:
        """Hide the recorded steps after ``step``, which the resumed training repeats."""
        self._options["purge_step"] = step + 1

    def start(self) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder), **self._options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Add the configuration as hyperparameters."""
        flat = {
            name: value if isinstance(value, int | float | str | bool) else repr(value)
            for name, value in values.items()
        }
        self._writer.add_hparams(flat, {}, run_name=".")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add scalars, strings, and dictionaries of scalars, each of which is one chart."""
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, dict):
                self._writer.add_scalars(name, value, global_step=step, **kwargs)
            else:
                self._writer.add_scalar(name, value, global_step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add pictures; with ``dataformats`` in ``kwargs``, pass values to ``SummaryWriter.add_images`` unchanged."""
        for name, value in values.items():
            if "dataformats" in kwargs:
                self._writer.add_images(name, value, global_step=step, **kwargs)
            else:
                self._add_pictures(name, pictures(value), step, kwargs)

    def _add_pictures(self, name: str, images: Sequence[np.ndarray], step: int | None, kwargs: dict[str, Any]) -> None:
        """Add pictures of one shape as one grid, and pictures of several shapes one by one."""
        if len({image.shape for image in images}) == 1:
            self._writer.add_images(name, np.stack(images), global_step=step, dataformats="NHWC", **kwargs)
        else:
            for key, image in numbered(name, images).items():
                self._writer.add_image(key, image, global_step=step, dataformats="HWC", **kwargs)

    def log_table(
        self, table_name: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int | None = None
    ) -> None:
        """Add the table as Markdown text, which TensorBoard renders as a table."""
        rows = [list(columns), ["---"] * len(columns), *data]
        text = "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
        self._writer.add_text(table_name, text, global_step=step)

    def flush(self) -> None:
        """Write buffered values."""
        self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()
