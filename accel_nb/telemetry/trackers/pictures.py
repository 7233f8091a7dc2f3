"""Conversion of images to arrays of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_nb.errors import MisuseError

_CHANNELS = (1, 3, 4)


def pictures(value: Any) -> list[np.ndarray]:
    """Return copies of one picture or of several as arrays (height, width, channels) of bytes.

    A picture is a PIL image, an array or a tensor: (height, width), or with 1, 3 or 4 channels, last in an array and
    first in a tensor where both are possible; bytes from 0 to 255, or floats from 0 to 1. Several are a list, or have
    one more dimension. Raises `MisuseError` for anything else.
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [picture for item in value for picture in pictures(item)]  # pyright: ignore[reportUnknownVariableType]
    detach = getattr(value, "detach", None)
    array = np.asarray(value) if detach is None else detach().cpu().numpy()
    shape = array.shape
    if array.dtype.kind not in "biuf" or not 2 <= array.ndim <= 4:
        raise MisuseError(f"log_images got a {type(value).__name__}; a picture is one of PIL, an array or a tensor")
    if array.ndim == 2:
        array = array[..., None]
    else:
        ways = [axis for axis in ((-1, -3) if detach is None else (-3, -1)) if array.shape[axis] in _CHANNELS]
        if not ways:
            raise MisuseError(f"log_images got a picture of shape {shape}: none of its ends is 1, 3 or 4 channels")
        array = np.moveaxis(array, ways[0], -1)
    if array.dtype.kind == "f":
        array = np.nan_to_num(array).clip(0, 1) * 255
    elif array.dtype.kind == "b":
        array = array * 255
    array = array.clip(0, 255).astype(np.uint8)
    return list(array) if array.ndim == 4 else [array]


def numbered(name: str, images: Sequence[Any]) -> dict[str, Any]:
    """Return several pictures under numbered names; a single one keeps the name."""
    return {name: images[0]} if len(images) == 1 else {f"{name}/{index}": item for index, item in enumerate(images)}


def squeeze_channel(picture: np.ndarray) -> np.ndarray:
    """Return a picture in the shape that most libraries expect: a single channel without its dimension."""
    return picture[..., 0] if picture.shape[-1] == 1 else picture
