"""Reading of tensors from safetensors files; headers and indices are checked before any tensor is read."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import signal
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_nb.bigmodel.host_memory import empty_tensors
from accel_nb.errors import ConfigError, CorruptCheckpoint
from accel_nb.runtime import safetensors_header
from accel_nb.runtime.safetensors_header import SUFFIX, read_file_header
from accel_nb.runtime.strict_json import parse_strict_json

DTYPES = {name: getattr(torch, torch_name) for name, (torch_name, _) in safetensors_header.DTYPES.items()}
INDEX_SUFFIX = ".index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_MAX_INDEX_BYTES = 100_000_000
CHUNK_BYTES = 8 << 20
"""Size of a read where bytes are converted or copied to a device."""
_STAGING_BYTES = 4 << 20
_SECTOR_BYTES = 4096
"""Alignment of direct reads (``O_DIRECT``) in file and memory."""
_DIRECT_FLAG: int = getattr(os, "O_DIRECT", 0)
_CACHESTAT = 451
"""The number of Linux' system call ``cachestat``."""
_POPULATE_READ = 22
"""Linux' ``MADV_POPULATE_READ``, which Python defines since 3.14."""


class SafetensorsFile:
    """An open safetensors file and its tensors; several threads may read at once.

    It stays readable if its name is removed while it is open. `acquire_lease` delays writes by other processes.
    """

    def __init__(self, path: Path, *, may_be_link: bool = False) -> None:
        self.path = path
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if may_be_link else os.O_NOFOLLOW)
        try:
            self.fd = os.open(path, flags)
        except OSError as error:
            kind = "it is a link" if path.is_symlink() and not may_be_link else error.strerror
            raise ConfigError(f"the checkpoint's file {path} cannot be read: {kind}") from error
        self.close = weakref.finalize(self, os.close, self.fd)
        self._direct: int | None = None
        self._mapping: mmap.mmap | None = None
        self._staging: list[mmap.mmap] = []
        self._lease_lock = threading.Lock()
        self._num_leases = 0
        try:
            status = os.fstat(self.fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"the checkpoint's file {path} is not a regular file")
            self.nbytes = status.st_size
            self.tensors = {
                name: FileTensor(name, self, entry.start, DTYPES[entry.dtype], entry.shape)
                for name, entry in read_file_header(self.fd, str(path)).items()
            }
        except CorruptCheckpoint as error:
            self.close()
            raise ConfigError(str(error)) from None
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset`` on; raises `OSError` if the file was truncated."""
        if self._direct is not None and len(out) >= _STAGING_BYTES:
            self._read_direct(self._direct, offset, out)
            return
        while out:
            count = os.preadv(self.fd, [out], offset)
            if count == 0:
                raise self._truncation_error(offset)
            offset += count
            out = out[count:]

    def bypass_cache(self) -> bool:
        """Read large tensors with ``O_DIRECT`` from now on; returns whether system and file allow it.

        For files larger than the page cache: filling it costs more processor time than the reads.
        """
        if self._direct is None and _DIRECT_FLAG:
            try:
                fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | _DIRECT_FLAG)
            except OSError:
                return False
            weakref.finalize(self, os.close, fd)
            self._direct = fd
        return self._direct is not None

    def mapping(self) -> mmap.mmap:
        """Return the file as a copy-on-write memory map whose pages are read at once."""
        if self._mapping is None:
            pages = mmap.mmap(self.fd, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            _populate(pages)
            self._mapping = pages
        return self._mapping

    def map_part(self, offset: int, nbytes: int, *, whole: bool = True) -> Tensor:
        """Return the bytes of a part of the file, in a copy-on-write memory map; ``whole``: all pages are read at once.

        Raises `OSError` if they cannot be read, or the file was truncated. Access to mapped bytes that are truncated
        later ends the process: call `acquire_lease`, and check the length.
        """
        self.check_length()
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(
            self.fd, skipped + nbytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE,
            offset=offset - skipped,
        )  # fmt: skip
        if whole:
            _populate(pages)
        else:
            pages.madvise(mmap.MADV_RANDOM)
        return torch.frombuffer(pages, dtype=torch.uint8, count=nbytes, offset=skipped)

    def acquire_lease(self) -> None:
        """Acquire a read lease: processes that open the file for writing or truncate it wait until `release_lease`.

        Linux ends their wait after `/proc/sys/fs/lease-break-time` (45 s). Raises `OSError` if the file is open for
        writing, a process waits to write, or the file system does not support leases.
        """
        with self._lease_lock:
            if not self._num_leases:
                fcntl.fcntl(self.fd, fcntl.F_SETSIG, signal.SIGURG)  # by default SIGIO, which would end the process
                fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            elif fcntl.fcntl(self.fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
                raise OSError(errno.EBUSY, f"another process waits to write to {self.path}")
            self._num_leases += 1

    def release_lease(self) -> None:
        """Release the lease of `acquire_lease`."""
        with self._lease_lock:
            self._num_leases -= 1
            if not self._num_leases:
                fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    def can_lease(self) -> bool:
        """Return whether a lease can be acquired now."""
        if not hasattr(fcntl, "F_SETLEASE"):
            return False
        try:
            self.acquire_lease()
        except OSError:
            return False
        self.release_lease()
        return True

    def check_length(self) -> None:
        """Raise `OSError` if the file was truncated."""
        length = os.fstat(self.fd).st_size
        if length < self.nbytes:
            raise self._truncation_error(length)

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """Return whether a range of bytes is in the page cache; only a sample of its pages is checked."""
        if self._direct is not None or not nbytes:
            return self._direct is None
        places = (*range(offset, offset + nbytes, CHUNK_BYTES), offset + nbytes - 1)
        return all(_is_page_cached(self.fd, place) for place in places)

    def advise_read(self, offset: int, nbytes: int) -> None:
        """Advise the system to read bytes into the page cache."""
        if self._direct is None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def _read_direct(self, fd: int, offset: int, out: memoryview) -> None:
        """Read whole sectors into a staging buffer and copy from there, since tensors are not aligned in files."""
        try:
            staging = self._staging.pop()
        except IndexError:
            staging = mmap.mmap(-1, _STAGING_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        source = ctypes.addressof(ctypes.c_char.from_buffer(staging))
        target = ctypes.addressof(ctypes.c_char.from_buffer(out))
        done = 0
        try:
            while done < len(out):
                skipped = (offset + done) % _SECTOR_BYTES
                count = min(os.preadv(fd, [staging], offset + done - skipped) - skipped, len(out) - done)
                if count <= 0:
                    raise self._truncation_error(offset + done)
                ctypes.memmove(target + done, source + skipped, count)  # releases the GIL
                done += count
        finally:
            self._staging.append(staging)

    def _truncation_error(self, offset: int) -> OSError:
        return OSError(f"{self.path} ends before byte {offset}: it was truncated while in use")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file; ``offset`` in bytes from the start of the file."""

    name: str
    file: SafetensorsFile
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return self.numel * self.dtype.itemsize

    def slice(self, begin: int, count: int) -> FileTensor:
        """Return ``count`` elements from ``begin`` on as a one-dimensional tensor in the file."""
        return FileTensor(self.name, self.file, self.offset + begin * self.dtype.itemsize, self.dtype, (count,))

    def map(self) -> Tensor:
        """Return a tensor over the file's mapped pages."""
        if not self.numel:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        flat = torch.frombuffer(self.file.mapping(), dtype=self.dtype, count=self.numel, offset=self.offset)
        return flat.view(self.shape)

    def is_in_memory(self) -> bool:
        """Return whether it is in the page cache, so that reading it does not wait for a disk."""
        return self.file.is_cached(self.offset, self.nbytes)

    def advise_read(self) -> None:
        """Advise the system to read it into the page cache."""
        self.file.advise_read(self.offset, self.nbytes)

    def read_into(self, out: Tensor) -> None:
        """Fill a contiguous CPU tensor of the same number of elements; other dtypes are converted in chunks."""
        if out.dtype == self.dtype:
            if self.numel:
                self.file.read(self.offset, as_bytes(out))
            return
        for begin, part in self.chunks():
            out.view(-1)[begin : begin + part.numel()].copy_(part)

    def chunks(self, allocate: Callable[[int], Tensor] | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield the first index of each chunk, and the chunk as stored; without ``allocate`` all share a buffer."""
        per_chunk = max(1, CHUNK_BYTES // self.dtype.itemsize)
        nbytes = min(per_chunk, self.numel) * self.dtype.itemsize
        buffer = None if allocate else empty_tensors([((nbytes,), torch.uint8)])[0]
        for begin in range(0, self.numel, per_chunk):
            nbytes = min(per_chunk, self.numel - begin) * self.dtype.itemsize
            target = allocate(nbytes) if allocate else buffer
            assert target is not None
            part = target[:nbytes]
            self.file.read(self.offset + begin * self.dtype.itemsize, as_bytes(part))
            yield begin, part.view(self.dtype)


class SafetensorsCheckpoint:
    """The tensors of one or several safetensors files, by name."""

    def __init__(self, path: Path, files: list[SafetensorsFile], tensors: dict[str, FileTensor]) -> None:
        self.path = path
        self.files = files
        self.tensors = tensors


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsCheckpoint:
    """Open a safetensors file, an index of several (``.index.json``), or the folder that holds either.

    Raises `ConfigError` with all problems: files missing, truncated, outside of the folder, links (except in a Hugging
    Face cache), unknown dtypes, pickled files.
    """
    path = Path(path)
    is_folder = path.is_dir()
    if is_folder:
        path = _in_folder(path)
    _refuse_pickled(path)
    if path.name.endswith(INDEX_SUFFIX):
        return _open_index(path)
    if not path.exists() and not path.is_symlink():
        raise ConfigError(f"there is no checkpoint at {path}; give a {SUFFIX} file, an index of them, or their folder")
    # A file named by the user may be a link; one found in a folder may not.
    file = SafetensorsFile(
        _checked(path.parent.resolve(), path.name, path.parent) if is_folder else path, may_be_link=True
    )
    return SafetensorsCheckpoint(path, [file], dict(file.tensors))


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _populate(pages: mmap.mmap) -> None:
    """Read and map all pages without the GIL; raises `OSError` where an access would end the process."""
    if sys.platform != "linux":
        return
    start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pages)))
    if _libc().madvise(start, ctypes.c_size_t(len(pages)), _POPULATE_READ) and ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Linux before 5.14 lacks this advice (EINVAL) and reads each page on access.


def _is_page_cached(fd: int, offset: int) -> bool:
    """Return whether a byte of a file is in the page cache; False if the system cannot report it."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    query, result = (ctypes.c_uint64 * 2)(offset, 1), (ctypes.c_uint64 * 5)()
    if not _libc().syscall(_CACHESTAT, fd, query, result, 0):
        return result[0] > 0
    if ctypes.get_errno() != errno.ENOSYS:
        return False
    try:  # before Linux 6.5; starts a read if the byte is not cached
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor with at least one element."""
    assert tensor.is_contiguous(), "the tensor must be contiguous"
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _in_folder(folder: Path) -> Path:
    indices = sorted(folder.glob(f"*{SUFFIX}{INDEX_SUFFIX}"))
    files = sorted(folder.glob(f"*{SUFFIX}"))
    for found in (indices, files):
        preferred = [path for path in found if path.name.startswith("model.")] or found
        if len(preferred) == 1:
            return preferred[0]
        if preferred:
            names = ", ".join(path.name for path in preferred[:5])
            raise ConfigError(f"{folder} holds several checkpoints: {names}; give the path of the one to load")
    for path in sorted(folder.iterdir()):
        _refuse_pickled(path)
    raise ConfigError(f"{folder} holds no {SUFFIX} file and no index of such files")


def _refuse_pickled(path: Path) -> None:
    name = path.name.removesuffix(INDEX_SUFFIX)
    if name.endswith(_PICKLE_SUFFIXES):
        raise ConfigError(
            f"{path} is pickled, and loading it could run any code; if you trust it, convert it once: "
            "safetensors.torch.save_file(torch.load(PATH, weights_only=True), 'model.safetensors')"
        )


def _open_index(path: Path) -> SafetensorsCheckpoint:
    weight_map = _read_index(path)
    root = path.parent.resolve()
    problems: list[str] = []
    files: dict[str, SafetensorsFile] = {}
    for name in dict.fromkeys(weight_map.values()):
        try:
            files[name] = SafetensorsFile(_checked(root, name, path))
        except ConfigError as error:
            problems += error.problems
    tensors: dict[str, FileTensor] = {}
    for tensor, name in weight_map.items():
        file = files.get(name)
        if file is not None and tensor not in file.tensors:
            problems.append(f"{path.name} lists {_quoted(tensor)} in {name}, which does not contain it")
        elif file is not None:
            tensors[tensor] = file.tensors[tensor]
    # Tensors missing in the index are reported as unexpected if the model does not use them.
    for file in files.values():
        for tensor in file.tensors.values():
            tensors.setdefault(tensor.name, tensor)
    if problems:
        raise ConfigError(problems)
    return SafetensorsCheckpoint(path, list(files.values()), tensors)


def _read_index(path: Path) -> dict[str, str]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_INDEX_BYTES:
                raise ConfigError(f"{path} is not a regular file of at most {_MAX_INDEX_BYTES} bytes")
            found = parse_strict_json(file.read())
    except OSError as error:
        raise ConfigError(f"the index {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"the index {path} is not strict JSON: {error}") from error
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise ConfigError(f"the index {path} has no weight_map from tensor names to file names")
    return weight_map


def _checked(root: Path, name: str, index: Path) -> Path:
    """Return the path of a file that an index names; raises `ConfigError` if it may not be opened."""
    where = f"{index.name} names the file {_quoted(name)}"
    if not name or "\0" in name or "\\" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise ConfigError(f"{where}; only names of files in the folder of the index are allowed")
    if not name.endswith(SUFFIX):
        _refuse_pickled(Path(name))
        raise ConfigError(f"{where}, which is not a {SUFFIX} file")
    path = root / name
    real = Path(os.path.realpath(path))
    if path.is_symlink() and _in_cache(root, real):
        return real
    if real != path:
        raise ConfigError(f"{where}, which is a link to {real}, or in a linked folder; put the file itself there")
    return path


def _in_cache(root: Path, real: Path) -> bool:
    """Return whether a link has the form of a Hugging Face cache: it leads from snapshots/REVISION to blobs."""
    return root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"


def _quoted(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 200 else text[:200] + "...'"
