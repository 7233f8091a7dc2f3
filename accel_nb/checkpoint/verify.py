"""Verification of a checkpoint: the sizes and checksums of all files. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from accel_nb.checkpoint.manifest import Manifest, checksum, iter_chunks
from accel_nb.checkpoint.store import Store
from accel_nb.errors import CorruptCheckpoint

_MAX_THREADS = 8


def map_files(store: Store, name: str, manifest: Manifest) -> dict[str, memoryview]:
    """Return every file that the manifest lists; raises `CorruptCheckpoint` for a missing one or a wrong size."""
    return {file: store.map(name, file, record.size) for file, record in manifest.files.items()}


def verify_files(
    files: dict[str, memoryview], manifest: Manifest, url: str, *, share: tuple[int, int] = (0, 1)
) -> None:
    """Compare the checksums of all chunks, or of this rank's share ``(rank, world size)``, with those of the manifest.

    Raises `CorruptCheckpoint` that names the first bad file and byte range.
    """
    rank, size = share
    chunks = [chunk for index, chunk in enumerate(_chunks(manifest)) if index % size == rank]
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(chunks) or 1)
    with ThreadPoolExecutor(threads, "accel_nb-verify") as pool:
        sums = pool.map(lambda chunk: checksum(files[chunk[0]][chunk[1] : chunk[2]]), chunks)
        for (file, start, end, expected), found in zip(chunks, sums, strict=True):
            if found != expected:
                pool.shutdown(cancel_futures=True)
                raise CorruptCheckpoint(
                    f"{url}/{file}: bytes {start} to {end} are damaged: their checksum is {found:016x} instead of "
                    f"{expected:016x}"
                )


def _chunks(manifest: Manifest) -> Iterator[tuple[str, int, int, int]]:
    for file, record in manifest.files.items():
        for (start, end), expected in zip(iter_chunks(record.size), record.checksums, strict=True):
            yield file, start, end, expected
