"""Search for the checkpoints in a store, newest first, and removal of the oldest ones. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress

from accel_nb.checkpoint.layout import MANIFEST, MAX_JSON_BYTES, parse_step_name, parse_temporary_name
from accel_nb.checkpoint.manifest import Manifest, read_manifest
from accel_nb.checkpoint.store import Store
from accel_nb.checkpoint.store_url import open_store, split_url
from accel_nb.errors import CorruptCheckpoint, NoCheckpoint


def find_checkpoints(url: str | os.PathLike[str]) -> tuple[Store, list[str]]:
    """Return the store and the names of the checkpoints at a URL, newest first.

    The URL names one checkpoint, or a folder of checkpoints. Of a folder the result is every ``step_N`` with a
    manifest, ordered by step, not by time stamp. Raises `NoCheckpoint` if there is none.
    """
    root, name = split_url(url)
    if name:
        store = open_store(root)
        if is_complete(store, name):
            return store, [name]
        waiting = [folder for folder in store.folders() if parse_temporary_name(folder) == (name, "old")]
        if complete := [folder for folder in waiting if is_complete(store, folder)]:
            # The process was killed between the two renames of a replacement.
            return store, complete
    store = open_store(url)
    names = list_checkpoints(store)
    if not names:
        siblings = list_checkpoints(open_store(root))[:3] if name else []
        hint = f"; its parent folder has {', '.join(siblings)}" if siblings else ""
        what = "there is no complete checkpoint, neither itself nor a step_N in it"
        raise NoCheckpoint(f"{os.fspath(url)}: {what}{hint}")
    return store, names


def list_checkpoints(store: Store) -> list[str]:
    """Return the names of the automatic checkpoints that have a manifest, newest first."""
    found: list[tuple[int, int, str]] = []
    for folder in store.folders():
        kind = parse_temporary_name(folder)
        if kind is not None and kind[1] != "old":
            continue
        step = parse_step_name(kind[0] if kind else folder)
        if step is not None and is_complete(store, folder):
            found.append((step, 0 if kind else 1, folder))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def list_ids(store: Store) -> dict[str, str]:
    """Return the ids of the automatic checkpoints by their names, newest first; damaged ones are left out."""
    ids: dict[str, str] = {}
    for name in list_checkpoints(store):
        with suppress(CorruptCheckpoint):
            ids[name] = load_manifest(store, name).save_id
    return ids


def is_complete(store: Store, name: str) -> bool:
    """Return whether a folder has a manifest, which is written last."""
    return store.exists(name, MANIFEST)


def load_manifest(store: Store, name: str) -> Manifest:
    """Read and check a checkpoint's manifest; raises `CorruptCheckpoint`."""
    return read_manifest(store.read(name, MANIFEST, MAX_JSON_BYTES), f"{store.url}/{name}/{MANIFEST}")


def remove_oldest(store: Store, run: str, keep: int, *, newest: str) -> list[str]:
    """Remove the oldest checkpoints of a run until ``keep`` are left, and return their names.

    Removes only folders with an automatic name and a manifest of the same run, and never ``newest``.
    """
    own: list[str] = []
    for name in list_checkpoints(store):
        try:
            if parse_temporary_name(name) is None and load_manifest(store, name).origin.run == run:
                own.append(name)
        except CorruptCheckpoint:
            continue
    removed = [name for name in own[keep:] if name != newest]
    for name in removed:
        store.remove(name)
    return removed
