"""The store that a path or URL names. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

from accel_nb.checkpoint.remote import RemoteStore
from accel_nb.checkpoint.store import LocalStore, Store


def open_store(url: str | os.PathLike[str]) -> Store:
    """Return the store at a folder or URL, which need not exist yet.

    Raises `CheckpointError` if no installed package supports the URL's protocol.
    """
    text = os.fspath(url)
    if "://" not in text:
        return LocalStore(text)
    if text.startswith("file://"):
        return LocalStore(text.removeprefix("file://"))
    return RemoteStore(text)


def split_url(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the root that holds a checkpoint's folder, and the folder's name."""
    text = os.fspath(url)
    if "://" not in text or text.startswith("file://"):
        path = Path(text.removeprefix("file://")).expanduser().absolute()
        return str(path.parent), path.name
    root, _, name = text.rstrip("/").rpartition("/")
    return (root, name) if not root.endswith((":/", "/")) else (text, "")
