"""A launch as a Kubeflow TrainJob, to be applied with ``kubectl apply -f``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

RUNTIME = "torch-distributed"


def train_job(
    name: str, words: Sequence[str], *, nnodes: int, gpus: int | str | None, cpus: int | None, image: str | None
) -> str:
    """Return the manifest of a launch: each machine is a pod that runs the launch."""
    import yaml

    limits: dict[str, Any] = {}
    if isinstance(gpus, int):
        limits["nvidia.com/gpu"] = gpus
    if cpus is not None:
        limits["cpu"] = cpus
    trainer: dict[str, Any] = {"numNodes": nnodes}
    if image is not None:
        trainer["image"] = image
    trainer["command"] = ["accel-nb", "launch"]
    trainer["args"] = list(words)
    if limits:
        trainer["resourcesPerNode"] = {"limits": limits}
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": object_name(name)},
        "spec": {"runtimeRef": {"name": RUNTIME}, "trainer": trainer},
    }
    return yaml.safe_dump(document, sort_keys=False)


def object_name(name: str) -> str:
    """Return a valid Kubernetes name: up to 63 lower-case letters, digits and dashes."""
    text = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-")
    return text or "job"
