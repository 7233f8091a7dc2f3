"""Reader of folders written by ``accelerate``'s ``save_state``, used only on explicit request.

Weights are read from safetensors where there are any. Everything else in such a folder is pickled: it is read by
torch's ``weights_only`` unpickler, which builds only tensors and plain containers; there is no option to change that.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from torch import Tensor

from accel_nb.bigmodel.safetensors_reader import open_safetensors
from accel_nb.checkpoint.layout import MAX_JSON_BYTES, checked_file_name, parse_json
from accel_nb.errors import AccelNbError, CheckpointError, CorruptCheckpoint, NoCheckpoint
from accel_nb.runtime.rng import RngStates

OLDEST_TORCH = "2.10"
"""Older versions have known vulnerabilities of ``weights_only``."""

_INDEX = ".index.json"
_REFUSED_GLOBAL = re.compile(r"GLOBAL [\w.]{1,200}")
_ADVICE = "weights_only"
_PREFIXES = ("module.", "_orig_mod.")
# The types of NumPy's random state; none of them can run code from the file.
_RECONSTRUCT = np.empty(0).__reduce__()[0]  # a private function of NumPy, whose module differs by version
_ARRAY_PARTS = [_RECONSTRUCT, np.ndarray, np.dtype, type(np.dtype(np.uint32))]


@dataclass
class AccelerateState:
    """The content of a folder of ``save_state``; lists are in the order in which objects were prepared."""

    url: str
    models: list[dict[str, Any]] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    registered: list[Any] = field(default_factory=list)
    precision: dict[str, Any] = field(default_factory=dict)
    random: list[RngStates] = field(default_factory=list)
    """Of each rank."""

    unread: list[str] = field(default_factory=list)
    """The parts of the state that were not read, one line each with the reason."""

    @property
    def step(self) -> int:
        """The number of optimizer steps, if an optimizer counts them; else 0."""
        states = [state for item in self.optimizers for state in item.get("state", {}).values()]
        return max((int(state["step"]) for state in states if "step" in state), default=0)


def is_accelerate_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder has the files of ``accelerate``'s ``save_state``."""
    folder = Path(path)
    return any((folder / name).is_file() for name in ("random_states_0.pkl", "optimizer.bin"))


def read_accelerate_folder(path: str | os.PathLike[str]) -> AccelerateState:
    """Read a folder that ``accelerate``'s ``save_state`` has written; tensors are on the CPU.

    Raises `NoCheckpoint` if there is none, and `CorruptCheckpoint`, which names the file, for a file that is damaged,
    is a link, or holds other values than tensors and plain values.
    """
    check_torch_reads_pickles(path)
    folder = Path(path)
    if not is_accelerate_folder(folder):
        raise NoCheckpoint(f"{folder}: there is no checkpoint of accelerate: neither optimizer.bin nor random states")
    state = AccelerateState(str(folder))
    state.models = list(_models(folder))
    state.optimizers = [_unpickled(file) for file in _numbered(folder, "optimizer", ".bin")]
    state.schedulers = [_unpickled(file) for file in _numbered(folder, "scheduler", ".bin")]
    state.registered = [_unpickled(file) for file in _numbered(folder, "custom_checkpoint", ".pkl", first="_0")]
    contents = {file: _unpickled(file) for file in _numbered(folder, "random_states", ".pkl", first="_0")}
    state.random = [_random(file, content) for file, content in contents.items()]
    if any("torch_cuda_manual_seed" in content for content in contents.values()):
        state.unread.append("the random states of GPUs were not read: numbers that are drawn there differ")
    if (folder / "scaler.pt").exists():
        state.precision = _unpickled(folder / "scaler.pt")
    for kind in ("sampler", "dl_state_dict"):
        state.unread += [
            f"{file.name} was not read: loaders start their epoch again; skip_first_batches skips the batches that "
            "were trained on"
            for file in _numbered(folder, kind, ".bin")
        ]
    return state


def check_torch_reads_pickles(path: str | os.PathLike[str]) -> None:
    """Raise `CheckpointError` if this version of torch cannot read pickled files safely."""
    if Version(torch.__version__).release < Version(OLDEST_TORCH).release:
        raise CheckpointError(
            f"{os.fspath(path)}: its files are pickled, and torch {torch.__version__} cannot read such files safely; "
            f"{OLDEST_TORCH} and newer can"
        )


def check_plain_file(file: Path) -> Path:
    """Return the path of a regular file; raises `CorruptCheckpoint` if there is none, or if it is a link."""
    try:
        status = file.lstat()
    except OSError as error:
        raise CorruptCheckpoint(f"{file}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpoint(f"{file}: it is not a regular file")
    return file


def summarize_unpickling_error(error: Exception) -> str:
    """Return why torch's ``weights_only`` unpickler raised, without torch's advice to read the file unsafely."""
    text = str(error)
    refused = _REFUSED_GLOBAL.search(text)
    detail = refused[0] if refused else "" if _ADVICE in text else text.partition("\n")[0][:300]
    return f"{type(error).__name__}: {detail!a}" if detail else type(error).__name__


def _numbered(folder: Path, stem: str, suffix: str, *, first: str = "") -> Iterator[Path]:
    """Yield ``stem.bin``, ``stem_1.bin``, ... up to the first missing number."""
    file, number = folder / f"{stem}{first}{suffix}", 0
    while file.exists() or file.is_symlink():
        yield file
        number += 1
        file = folder / f"{stem}_{number}{suffix}"


def _models(folder: Path) -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        ending = f"_{number}" if number else ""
        found = [
            folder / name
            for stem, suffix in (("model", ".safetensors"), ("pytorch_model", ".bin"))
            for name in (f"{stem}{ending}{suffix}", f"{stem}{ending}{suffix}{_INDEX}")
            if (folder / name).exists()
        ]
        if not found:
            return
        yield _without_prefix(_weights(found[0]))
        number += 1


def _weights(file: Path) -> dict[str, Any]:
    if ".safetensors" in file.name:
        check_plain_file(file)
        try:
            stored = open_safetensors(file).tensors
        except AccelNbError as error:
            raise CorruptCheckpoint(str(error)) from error
        return {name: _read(tensor) for name, tensor in stored.items()}
    if not file.name.endswith(_INDEX):
        return _unpickled(file)
    with open(check_plain_file(file), "rb") as source:
        content = parse_json(source.read(MAX_JSON_BYTES), str(file))
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise CorruptCheckpoint(f"{file}: it has no weight_map")
    weights: dict[str, Any] = {}
    for name in dict.fromkeys(checked_file_name(value, str(file)) for value in names.values()):
        weights.update(_unpickled(file.parent / name))
    return weights


def _read(stored: Any) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    stored.read_into(tensor)
    return tensor


def _without_prefix(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights by the names of the plain model, without the prefixes of DDP and compiled models."""
    names = dict(weights)
    for prefix in _PREFIXES * 2:
        if names and all(name.startswith(prefix) for name in names):
            names = {name.removeprefix(prefix): value for name, value in names.items()}
    return names


def _unpickled(file: Path) -> Any:
    """Return the content of a pickle; raises `CorruptCheckpoint` unless it is a dict of tensors and plain values."""
    check_plain_file(file)
    try:
        with torch.serialization.safe_globals(_ARRAY_PARTS):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise CorruptCheckpoint(
            f"{file}: it holds more than tensors and plain values, or is damaged, and is not read "
            f"({summarize_unpickling_error(error)})"
        ) from None
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{file}: it holds a {type(content).__name__} instead of a dict")
    return content


def _random(file: Path, content: Any) -> RngStates:
    """Return generator states of a file in the form of `accel_nb.runtime.rng.capture`."""
    try:
        version, words, gauss = content["random_state"]
        _, key, position, has_gauss, cached = content["numpy_random_seed"]
        return {
            "python": torch.tensor([version, *words], dtype=torch.int64, device="cpu"),
            "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64, device="cpu"),
            "numpy": torch.tensor([*map(int, key), position, has_gauss], dtype=torch.int64, device="cpu"),
            "numpy_gauss": torch.tensor([cached], dtype=torch.float64, device="cpu"),
            "torch": content["torch_manual_seed"].cpu(),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpoint(f"{file}: these are not random states ({type(error).__name__}: {error})") from None
