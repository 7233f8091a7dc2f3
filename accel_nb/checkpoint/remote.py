"""A store behind a URL, by fsspec. Object stores have no rename: writing the manifest completes a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from accel_nb.checkpoint.layout import LATEST, MANIFEST, MAX_JSON_BYTES
from accel_nb.checkpoint.manifest import read_manifest
from accel_nb.checkpoint.store import Buffer
from accel_nb.errors import AccelNbError, CheckpointError, CorruptCheckpoint


@contextmanager
def _as_os_errors(operation: str) -> Iterator[None]:
    """Convert the clients' own exception types to `OSError`."""
    try:
        yield
    except (AccelNbError, OSError):
        raise
    except Exception as error:
        raise OSError(f"{operation}: {type(error).__name__}: {error}") from error


class RemoteStore:
    """A store on any file system of fsspec, such as ``s3://``, ``gs://`` and ``memory://``."""

    supports_rename = False

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url
        try:
            self._fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{url}: no store can be opened ({error})") from error
        self._fs: Any
        self._root = root.rstrip("/")
        self.is_shared = not url.startswith("memory:")

    def folders(self) -> list[str]:
        """Return the names of the folders under the root."""
        return self._names("", "directory")

    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a folder."""
        return self._names(folder, "file")

    def begin(self, name: str, save_id: str) -> str:
        """Create the checkpoint's own folder and return its name; its files are ignored until the manifest exists."""
        with _as_os_errors(self._format_url(name)):
            self._fs.makedirs(self._path(name), exist_ok=True)
        return name

    def write(self, folder: str, file: str, content: Iterable[Buffer]) -> None:
        """Upload a file; it is durable once it is closed."""
        with _as_os_errors(self._format_url(folder, file)), self._fs.open(self._path(folder, file), "wb") as target:
            for buffer in content:
                target.write(buffer)

    def write_atomically(self, folder: str, file: str, content: bytes) -> None:
        """Upload the file; object stores write objects atomically."""
        with _as_os_errors(self._format_url(folder, file)):
            self._fs.pipe_file(self._path(folder, file), content)

    def exists(self, folder: str, file: str) -> bool:
        """Return whether a file exists."""
        self._fs.invalidate_cache()
        with _as_os_errors(self._format_url(folder, file)):
            return bool(self._fs.isfile(self._path(folder, file)))

    def read(self, folder: str, file: str, limit: int) -> bytes:
        """Return a file's content; raise `CorruptCheckpoint` if it has more than ``limit`` bytes."""
        if self.size(folder, file) > limit:
            raise CorruptCheckpoint(
                f"{self._format_url(folder, file)}: it is larger than the {limit} bytes that are allowed"
            )
        with _as_os_errors(self._format_url(folder, file)):
            return self._fs.cat_file(self._path(folder, file))

    def size(self, folder: str, file: str) -> int:
        """Return a file's size."""
        try:
            with _as_os_errors(self._format_url(folder, file)):
                info = self._fs.info(self._path(folder, file))
        except FileNotFoundError:
            raise CorruptCheckpoint(f"{self._format_url(folder, file)}: No such file or directory") from None
        if info.get("type") != "file" or info.get("islink"):
            raise CorruptCheckpoint(f"{self._format_url(folder, file)}: it is not a regular file")
        return int(info["size"])

    def map(self, folder: str, file: str, size: int) -> memoryview:
        """Download a file into memory."""
        found = self.size(folder, file)
        if found != size:
            raise CorruptCheckpoint(f"{self._format_url(folder, file)}: it has {found} bytes instead of {size}")
        with _as_os_errors(self._format_url(folder, file)):
            content = self._fs.cat_file(self._path(folder, file))
        if len(content) != size:  # the file was replaced meanwhile
            raise CorruptCheckpoint(f"{self._format_url(folder, file)}: {len(content)} of {size} bytes were received")
        return memoryview(bytearray(content))

    def commit(self, folder: str, name: str, save_id: str, manifest: bytes) -> None:
        """Upload the manifest, then remove the files that the replaced one listed.

        The response to the upload may be lost: the commit has succeeded if the manifest exists.
        """
        replaced: list[str] = []
        found = self._manifest(folder)
        if found is not None:
            with suppress(CorruptCheckpoint):  # a damaged one is replaced; its files remain
                replaced = list(read_manifest(found, self._format_url(folder, MANIFEST)).files)
        try:
            with _as_os_errors(self._format_url(folder, MANIFEST)):
                self._fs.pipe_file(self._path(folder, MANIFEST), manifest)
        except OSError:
            if self._manifest(folder) != manifest:
                raise
        self.remove_files(folder, replaced)

    def write_latest(self, name: str) -> None:
        """Upload the name of the newest checkpoint."""
        with _as_os_errors(self._format_url(LATEST)):
            self._fs.pipe_file(self._path(LATEST), name.encode() + b"\n")

    def remove_files(self, folder: str, files: Iterable[str]) -> None:
        """Remove files."""
        for file in files:
            try:
                with _as_os_errors(self._format_url(folder, file)):
                    self._fs.rm_file(self._path(folder, file))
            except FileNotFoundError:
                continue

    def discard(self, folder: str, files: Sequence[str]) -> None:
        """Remove the files of one save, unless a manifest lists them; its upload may have succeeded."""
        found = self._manifest(folder)
        if found is None or not set(read_manifest(found, self._format_url(folder, MANIFEST)).files) & set(files):
            self.remove_files(folder, files)

    def remove(self, name: str) -> None:
        """Remove the checkpoint, manifest first."""
        self.remove_files(name, [MANIFEST])
        self._fs.invalidate_cache()
        with _as_os_errors(self._format_url(name)):
            if self._fs.exists(self._path(name)):
                self._fs.rm(self._path(name), recursive=True)

    def remove_stale(self) -> None:
        """Do nothing: the store has no record of the process that wrote a file, so it may still be writing."""

    def _manifest(self, folder: str) -> bytes | None:
        return self.read(folder, MANIFEST, MAX_JSON_BYTES) if self.exists(folder, MANIFEST) else None

    def _names(self, folder: str, kind: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            with _as_os_errors(self._format_url(folder)):
                found = self._fs.ls(self._path(folder), detail=True)
        except FileNotFoundError:
            return []
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == kind]
        return [name for name in names if name]

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *(part for part in parts if part)))

    def _format_url(self, *parts: str) -> str:
        return "/".join((self.url.rstrip("/"), *(part for part in parts if part)))
