"""Conversion of images to arrays of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_nb.errors import MisuseError

_CHANNELS = (1, 3, 4)
_OTHER_MODES = {
    **dict.fromkeys(("P", "CMYK", "YCbCr", "LAB", "HSV", "RGBX"), False),
    **dict.fromkeys(("PA", "LA", "La", "RGBa"), True),
}
"""Modes of PIL images whose channels are not those of L, RGB and RGBA; whether they have transparency."""


def pictures(value: Any) -> list[np.ndarray]:
    """Return copies of one or several pictures as uint8 arrays of shape (height, width, channels).

    A picture is a PIL image, an array or a tensor of shape (height, width), or with a first or last dimension of 1, 3
    or 4 channels; if both are possible, the last one in an array and the first one in a tensor. Values are integers
    from 0 to 255 or floats from 0 to 1. Several pictures are a list, or have one more dimension. Raises `MisuseError`
    for any other value.
    """
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [picture for item in value for picture in pictures(item)]  # pyright: ignore[reportUnknownVariableType]
    detach = getattr(value, "detach", None)
    array = np.asarray(_as_colors(value)) if detach is None else _as_array(detach())
    shape = array.shape
    if array.dtype.kind not in "biuf" or not 2 <= array.ndim <= 4:
        raise MisuseError(f"log_images got a {type(value).__name__}; a picture is a PIL image, an array or a tensor")
    if array.ndim == 2:
        array = array[..., None]
    else:
        axes = [axis for axis in ((-1, -3) if detach is None else (-3, -1)) if array.shape[axis] in _CHANNELS]
        if not axes:
            raise MisuseError(
                f"log_images got a picture of shape {shape}; its first or last dimension must be 1, 3 or 4 channels"
            )
        array = np.moveaxis(array, axes[0], -1)
    if array.dtype.kind == "f":
        array = np.nan_to_num(array).clip(0, 1) * 255
    elif array.dtype.kind == "b":
        array = array * 255
    array = array.clip(0, 255).astype(np.uint8)
    return list(array) if array.ndim == 4 else [array]


def _as_colors(value: Any) -> Any:
    """Return a PIL image whose numbers are not brightness, such as one with a palette, in red, green and blue."""
    mode = getattr(value, "mode", None)
    if mode not in _OTHER_MODES:
        return value
    has_alpha = _OTHER_MODES[mode] or "transparency" in value.info
    return value.convert("RGBA" if has_alpha else "RGB")


def _as_array(tensor: Any) -> np.ndarray:
    return (tensor.float() if tensor.is_floating_point() else tensor).cpu().numpy()  # NumPy has no bfloat16


def numbered(name: str, images: Sequence[Any]) -> dict[str, Any]:
    """Return pictures by numbered names such as ``name/0``; a single picture has the plain name."""
    return {name: images[0]} if len(images) == 1 else {f"{name}/{index}": item for index, item in enumerate(images)}


def squeeze_channel(picture: np.ndarray) -> np.ndarray:
    """Return a picture in the shape that most libraries expect: the dimension of a single channel is removed."""
    return picture[..., 0] if picture.shape[-1] == 1 else picture
