"""A job on two ranks that logs to every tracker at once: ``python -m tests.trackers.job FOLDER first|resumed``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

NAMES = ("jsonl", "tensorboard", "wandb", "mlflow", "comet_ml", "clearml", "aim", "swanlab", "trackio", "dvclive")


def train(folder: str, part: str) -> dict[str, Any]:
    """Take two steps, save, take one more; a resumed training takes the third step again."""
    import logging

    import numpy as np
    import torch

    from accel_nb import Accelerator

    problems: list[str] = []
    keep = logging.Handler()
    keep.emit = lambda record: problems.append(f"{record.getMessage()} {record.exc_info}")  # type: ignore[method-assign]
    logging.getLogger("accel_nb").addHandler(keep)

    accelerator = Accelerator(log_with=list(NAMES), project_dir=folder)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kinds = {
        "wandb": {"mode": "offline", "dir": folder},
        "mlflow": {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
        "comet_ml": {"online": False},
        "swanlab": {"mode": "offline", "log_dir": f"{folder}/swanlog"},
    }
    accelerator.init_trackers("digits", {"lr": 0.1, "api_key": "hunter2"}, kinds)
    if part == "resumed":
        accelerator.load_state(f"{folder}/checkpoint")
    for step in range(1, 4):
        if part == "resumed" and step < 3:
            continue
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": step / 4, "both": {"a": 1.0, "b": 2.0}, "note": f"{part} {step}"})
        if step == 2:
            accelerator.log_images({"picture": np.full((8, 8, 3), 200, np.uint8)})
            accelerator.log_table("scores", ["name", "score"], [["x", 1.5]])
            accelerator.log_artifact(Path(folder) / "artifact.txt")
            if accelerator.is_main_process:
                accelerator.get_tracker("clearml")  # its id is known from then on
            accelerator.save_state(f"{folder}/checkpoint")
    used = {name for name in sys.modules if name in NAMES and name != "tensorboard"}
    accelerator.end_training()
    return {"rank": accelerator.process_index, "imported": sorted(used), "problems": problems}


if __name__ == "__main__":
    import json

    from accel_nb import notebook_launcher

    print(json.dumps(notebook_launcher(train, (sys.argv[1], sys.argv[2]), num_processes=2)))
