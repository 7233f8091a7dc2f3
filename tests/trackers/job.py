"""Jobs that log with the real packages: ``python -m tests.trackers.job FOLDER first|resumed|down``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

NAMES = ("jsonl", "tensorboard", "wandb", "mlflow", "comet_ml", "clearml", "aim", "swanlab", "trackio", "dvclive")


def train(folder: str, part: str) -> dict[str, Any]:
    """Take two steps, save, take one more; a resumed training takes the third step again."""
    import numpy as np
    import torch

    from accel_nb import Accelerator

    problems = _noted()
    accelerator = Accelerator(log_with=list(NAMES), project_dir=folder)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    kinds = {
        "wandb": {"mode": "offline", "dir": folder},
        "mlflow": {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "artifact_location": f"{folder}/artifacts"},
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
                # The first import of so many packages takes its time; when the last is there, all are.
                any(accelerator.get_tracker(NAMES[-1], unwrap=True) is not None for _ in range(8))
            accelerator.save_state(f"{folder}/checkpoint")
    accelerator.end_training(timeout_s=180)
    used = {name for name in list(sys.modules) if name in NAMES and name != "tensorboard"}
    return {"rank": accelerator.process_index, "imported": sorted(used), "problems": problems}


def log_to_a_server_that_is_down(folder: str) -> dict[str, Any]:
    """Log to a server that does not answer, and to a file."""
    from accel_nb import Accelerator

    problems = _noted()
    accelerator = Accelerator(cpu=True, log_with=["mlflow", "jsonl"], project_dir=folder)
    accelerator.init_trackers("down", init_kwargs={"mlflow": {"tracking_uri": "http://127.0.0.1:9"}})
    for step in range(3):
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.end_training()
    return {"problems": problems}


def _noted() -> list[str]:
    """Return a list that gets every warning of ours, with the error behind it."""
    import logging

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            noted.append(f"{record.getMessage()} {record.exc_info}")

    noted: list[str] = []
    logging.getLogger("accel_nb").addHandler(Noting())
    return noted


if __name__ == "__main__":
    import json

    from accel_nb import notebook_launcher

    if sys.argv[2] == "down":
        print(json.dumps([log_to_a_server_that_is_down(sys.argv[1])]))
    else:
        print(json.dumps(notebook_launcher(train, (sys.argv[1], sys.argv[2]), num_processes=2)))
