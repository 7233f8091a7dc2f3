"""Random state: seeding, derived seeds, and generator states as plain tensors."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from accel_nb.runtime.devices.registry import device_type, loaded_types
from accel_nb.runtime.world import World

CpuRngStates = tuple[tuple[bytes, Any], tuple[bytes, int, int, float], bytes]
"""The states of Python's, NumPy's and torch's global CPU generators as plain values, returned by `capture_cpu`."""

RngStates = dict[str, Tensor]
"""Generator states by name: ``python``, ``numpy``, ``torch`` and, if requested, ``device``; all are CPU tensors."""

Part = Literal["python", "numpy", "torch"]
ALL_PARTS: tuple[Part, ...] = ("python", "numpy", "torch")

_PYTHON_VERSION = 3  # the version number in the tuple of `random.getstate`
_PYTHON_WORDS = 625
_NUMPY_WORDS = 624
_MAX_NUMPY_SEED = 2**32


def derive_seed(seed: int, *keys: int | str) -> int:
    """Return a seed that depends on ``seed`` and every key, in ``[0, 2**63)``.

    BLAKE2b over the decimal seed and the keys with their types: the result is the same on every machine and version of
    Python, and the results of similar inputs are unrelated.
    """
    text = "\x1f".join([str(int(seed)), *(f"{type(key).__name__}:{key}" for key in keys)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def set_seed(seed: int, *, per_rank: World | None = None, step: int | None = None) -> int:
    """Seed Python, NumPy and torch on all devices, and return the seed.

    With ``per_rank`` each rank has a different random stream, and rank 0 the stream of a single process. With ``step``
    the streams also depend on that number, so that the numbers drawn in a step do not depend on earlier steps.
    """
    if step is not None:
        seed = derive_seed(seed, "step", step)
    if per_rank is not None and per_rank.rank > 0:
        seed = derive_seed(seed, "rank", per_rank.rank)
    random.seed(seed)
    np.random.seed(seed % _MAX_NUMPY_SEED)  # user code draws from the global generator
    torch.manual_seed(seed)
    for kind in loaded_types():
        kind.seed_beside_torch(seed)
    return seed


def capture(device: torch.device | str | None = None, *, parts: Sequence[Part] = ALL_PARTS) -> RngStates:
    """Return the states of the global generators, and of the generator of ``device`` if it is not the CPU.

    The states are plain CPU tensors, so that they can be stored and sent without pickle.
    """
    states: RngStates = {}
    if "python" in parts:
        version, words, gauss = random.getstate()
        states["python"] = torch.tensor([version, *words], dtype=torch.int64, device="cpu")
        states["python_gauss"] = torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64, device="cpu")
    if "numpy" in parts:
        state = _numpy_state()
        words = state["state"]["key"].astype(np.int64)
        states["numpy"] = torch.from_numpy(np.append(words, [state["state"]["pos"], state["has_gauss"]]))
        states["numpy_gauss"] = torch.tensor([state["gauss"]], dtype=torch.float64, device="cpu")
    if "torch" in parts:
        states["torch"] = torch.get_rng_state()
    if (own := _device_with_generator(device)) is not None:
        states["device"] = device_type(own).get_rng_state(own)
    return states


def capture_cpu() -> CpuRngStates:
    """Return the states of the global CPU generators for another process of this machine; faster than `capture`."""
    found, (_, words, gauss) = _numpy_state(), random.getstate()
    numpy_states = found["state"]["key"].tobytes(), found["state"]["pos"], found["has_gauss"], found["gauss"]
    return (array("I", words).tobytes(), gauss), numpy_states, torch.get_rng_state().numpy().tobytes()


def restore_cpu(states: CpuRngStates) -> None:
    """Set the global CPU generators to states that `capture_cpu` has returned."""
    (words, gauss), (key, position, has_gauss, numpy_gauss_value), torch_state = states
    random.setstate((_PYTHON_VERSION, tuple(array("I", words)), gauss))
    key = np.frombuffer(key, dtype=np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, numpy_gauss_value))
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))


@lru_cache(maxsize=1)
def digest(states: CpuRngStates) -> str:
    """Return a digest of the states; the last result is cached."""
    (words, gauss), (key, *rest), torch_state = states
    found = hashlib.blake2b(repr((gauss, rest)).encode(), digest_size=16)
    for part in (words, key, torch_state):
        found.update(part)
    return found.hexdigest()


def restore(states: Mapping[str, Tensor], device: torch.device | str | None = None) -> None:
    """Set the global generators to states that `capture` has returned; missing parts are not changed.

    ``device`` is the device of the state named ``device``; without it that state is ignored.
    """
    _check(states)
    if "python" in states:
        version, *words = states["python"].tolist()
        present, gauss = states["python_gauss"].tolist()
        random.setstate((version, tuple(words), gauss if present else None))
    if "numpy" in states:
        *words, position, has_gauss = states["numpy"].tolist()
        key = np.asarray(words, dtype=np.uint32)
        np.random.set_state(("MT19937", key, position, has_gauss, states["numpy_gauss"].item()))
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "device" in states and (own := _device_with_generator(device)) is not None:
        device_type(own).set_rng_state(states["device"], own)


@contextmanager
def fork_rng(states: Mapping[str, Tensor] | None = None, *, parts: Sequence[Part] = ALL_PARTS) -> Iterator[None]:
    """Run the block with other CPU generator states, then restore those from before it.

    Without ``states`` the block starts from the current ones, and ``parts`` are restored.
    """
    if states is not None:
        parts = [part for part in ALL_PARTS if part in states]
    before = capture(parts=parts)
    try:
        if states is not None:
            restore({name: state for name, state in states.items() if name != "device"})
        yield
    finally:
        restore(before)


def pack(states: Mapping[str, Tensor]) -> Tensor:
    """Return all states as one uint8 tensor, for one message; its length depends on the names only."""
    return torch.cat([state.contiguous().view(torch.uint8) for state in states.values()])


def unpack(message: Tensor, like: Mapping[str, Tensor]) -> RngStates:
    """Return the states of a message of `pack`; ``like`` has the names, dtypes and lengths."""
    chunks = message.split([state.numel() * state.element_size() for state in like.values()])
    return {
        # Copy: a view as int64 needs an aligned start, which a chunk of the message may lack.
        name: chunk.clone().view(state.dtype)
        for (name, state), chunk in zip(like.items(), chunks, strict=True)
    }


def _numpy_state() -> dict[str, Any]:
    state = cast(dict[str, Any], np.random.get_state(legacy=False))
    if (name := state["bit_generator"]) != "MT19937":
        raise ValueError(f"NumPy's global generator is {name!r}; only 'MT19937', its default, can be captured")
    return state


def _device_with_generator(device: torch.device | str | None) -> torch.device | None:
    """Return the device if it has its own generator, apart from the CPU's; else None."""
    if device is None:
        return None
    device = torch.device(device)
    return None if device_type(device).is_host else device


def _check(states: Mapping[str, Tensor]) -> None:
    for name, size in (("python", _PYTHON_WORDS + 1), ("numpy", _NUMPY_WORDS + 2)):
        if name not in states:
            continue
        if states[name].shape != (size,) or f"{name}_gauss" not in states:
            raise ValueError(
                f"the state {name!r} has shape {tuple(states[name].shape)}, not ({size},), or lacks '{name}_gauss': "
                "it does not come from accel_nb.runtime.rng.capture"
            )
    if "python" in states and int(states["python"][0]) != _PYTHON_VERSION:
        raise ValueError(f"Python random state of version {int(states['python'][0])}; known is {_PYTHON_VERSION}")
