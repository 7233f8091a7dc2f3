"""The file system as a rank other than rank 0 sees it in a plain cell, and the errors of operations on it.

A rank finds its own versions and folders, not the paths that it has removed, and otherwise the files of rank 0 without
the changes that this rank has not reached yet (`ChangedPaths`). Rank 0 raises the errors of the system. The other ranks
raise the same ones: code may handle them and continue, such as code that searches an unused folder name.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from accel_nb.accelerator.plain_cells.files.cell_files import (
    SYSTEM,
    TEMPORARY_SUFFIX,
    CellFiles,
    absolute,
    is_path,
)

_MAX_LINKS = 40
_POLL_S = 0.002
_MAX_WAIT_S = 2.0
"""How long a rank that lists a folder waits for rank 0 to create the files that this rank has created in it."""
UNKNOWN = -1
"""The mode of a path at which rank 0 may have made or removed a file that this rank cannot determine."""


class PathView(CellFiles):
    """The file system as one rank sees it. Its operations change this view, and not the paths themselves."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[str, io.FileIO] = {}
        self._folders: set[str] = set()
        self._removed: set[str] = set()
        # The symbolic links that this rank has made, each with its target.
        self._links: dict[str, str] = {}
        # The folders on disk that this rank has renamed, by the new path: the paths where they may be, also by a
        # descriptor of rank 0, and the identity by which they are found there.
        self._renamed: dict[str, tuple[list[str], tuple[int, int]]] = {}
        # Versions that were deleted, since there were too many: rank 0 has such a file, or creates it soon.
        self._dropped: set[str] = set()
        # The files that rank 0 had not created when this rank stopped waiting for them.
        self._only_here: set[str] = set()
        # Temporary files and folders that only this rank has, under names that no other rank uses.
        self._temporary: set[str] = set()

    def clear_paths(self) -> None:
        """Find the paths themselves from now on, and delete all versions."""
        for file in self._files.values():
            file.close()
        for paths in (self._files, self._folders, self._removed, self._links, self._renamed, self._dropped):
            paths.clear()
        self._only_here.clear()

    @property
    def _has_changes(self) -> bool:
        has_changed = self.changed is not None and self.changed.has_paths()
        return self._is_active and bool(self._files or self._folders or self._removed or self._links or has_changed)

    def _absolute(self, path: Any, *, follows_link: bool = True) -> str:
        """Return a path as an absolute one; the links that this rank has made are followed, as other code does."""
        full, number = absolute(path), 0
        while links := [link for link in self._links if is_in(full, link) and (follows_link or full != link)]:
            number += 1
            if number > _MAX_LINKS:
                raise_os_error(errno.ELOOP, path)
            target = os.path.join(os.path.dirname(links[0]), self._links[links[0]])
            full = os.path.normpath(target) + full[len(links[0]) :]
        return full

    def _redirects(self, path: Any) -> bool:
        """Return whether a write to a path is redirected: the cell's code makes it, to a regular file or a folder."""
        if not (self._is_active and is_path(path) and self._is_called_by_cell()):
            return False
        full = absolute(path)
        if full.startswith(SYSTEM) or any(is_in(full, path) for path in self._temporary):
            return False
        try:
            kind = original_stat(full).st_mode
        except OSError:
            return True
        return stat.S_ISREG(kind) or stat.S_ISDIR(kind)

    def _find(self, path: Any) -> Any:
        """Return the path to read from; raises FileNotFoundError for a path that this rank removed."""
        full = self._absolute(path)
        if full != absolute(path):  # in a link of this rank
            path = full
        file = self._files.get(full)
        if file is not None:
            return descriptor_path(file)
        if full in self._folders:
            return path
        if self._is_removed(full):
            raise_os_error(errno.ENOENT, path)
        actual = self._place(full)
        if actual is None:
            actual = full if self.changed is None else self.changed.find(full)
        return path if actual in (full, None) else actual

    def _place(self, full: str) -> str | None:
        """Return the present path of an item of a folder that this rank has renamed; None for any other path."""
        above = max((path for path in self._renamed if is_in(full, path)), key=len, default=None)
        if above is None:
            return None
        earlier, identity = self._renamed[above]
        if self.changed is not None and (old := self.changed.find(full)) not in (None, full):
            return old
        return next((path for path in earlier if _identity(path) == identity), above) + full[len(above) :]

    def _rename_folders(self, old: str, new: str) -> None:
        """Record the renaming of a folder on disk, and of those in it that were renamed before."""
        renamed = {new + path[len(old) :]: (path, *self._renamed.pop(path)) for path in self._renamed_in(old)}
        self._renamed |= {path: ([*earlier, last], identity) for path, (last, earlier, identity) in renamed.items()}
        place = self._place(old)
        if new in self._renamed or any(old in paths for paths in (self._files, self._folders, self._links)):
            return
        above = max((path for path in self._renamed if is_in(old, path)), key=len, default=None)
        earlier = [] if above is None else [path + old[len(above) :] for path in self._renamed[above][0]]
        actual = place or (old if self.changed is None else self.changed.find(old))
        if actual is not None and exists_as_folder(actual) and (identity := _identity(actual)) is not None:
            self._renamed[new] = [*earlier, actual, old], identity

    def _renamed_in(self, full: str) -> list[str]:
        return [path for path in self._renamed if is_in(path, full)]

    def _entries(self, path: Any) -> list[Any]:
        """Return the entries of a folder, with this rank's changes."""
        folder, full = os.fspath(path), self._absolute(path)
        own = {found: found in self._folders for found in (*self._files, *self._folders)}
        own = {found: is_folder for found, is_folder in own.items() if os.path.dirname(found) == full}
        for found in [] if self.changed is None else list(self.changed.entries_before(full)):
            if found not in own and not self._is_removed(found):
                own[found] = os.path.isdir(found)
        own |= {found: True for found in self._renamed if os.path.dirname(found) == full}
        links = [found for found in self._links if os.path.dirname(found) == full]
        names = {os.path.basename(found) for found in (*own, *links)}
        existing: list[Any] = []
        if full in self._folders and (self._is_removed(full) or not exists_as_folder(full)):
            pass
        elif self._is_removed(full):
            raise_os_error(errno.ENOENT, path)
        else:
            found = self._find(path)
            with _scandir(found) as scan:
                existing = [
                    item
                    for item in scan
                    if item.name not in names
                    and not item.name.endswith(TEMPORARY_SUFFIX)
                    and not self._is_removed(os.path.join(full, item.name))
                ]
            if found is not path:
                existing = [_Entry(folder, item.name, item.is_dir()) for item in existing]
        return [
            *existing,
            *(_Entry(folder, os.path.basename(found), is_folder) for found, is_folder in own.items()),
            *(_Entry(folder, os.path.basename(found), os.path.isdir(found), is_link=True) for found in links),
        ]

    def _list_entries(self, path: Any) -> list[Any]:
        """Return the entries of a folder, with this rank's changes, in the order in which rank 0 finds them."""
        entries = self._entries(path)
        if len(entries) < 2:
            return entries
        places = self._await_places(self._absolute(path))
        return sorted(self._entries(path), key=lambda entry: places.get(entry.name, len(places)))

    def _await_places(self, folder: str) -> dict[str, int]:
        """Return the place of each name in a folder, as the file system orders them.

        Waits up to `_MAX_WAIT_S` until rank 0 has also created the files that this rank has created in the folder.
        """
        made = {*self._files, *self._folders, *self._links, *self._dropped} - self._only_here
        names = {os.path.basename(path) for path in made if os.path.dirname(path) == folder}
        deadline = time.monotonic() + _MAX_WAIT_S
        while True:
            try:
                found = _listdir(folder)
            except OSError:  # rank 0 has not made the folder
                found = []
            missing = names.difference(found)
            if not missing or time.monotonic() > deadline:
                self._only_here |= {os.path.join(folder, name) for name in missing}
                return {name: place for place, name in enumerate(found)}
            time.sleep(_POLL_S)

    def _mode(self, full: str, *, follows_link: bool = False) -> int | None:
        """Return the mode of the file or folder that this rank finds at a path, if any; `UNKNOWN` if uncertain."""
        if full in self._files:
            return stat.S_IFREG
        if full in self._folders:
            return stat.S_IFDIR
        if full in self._links:
            return stat.S_IFLNK
        if any(is_in(full, path) for path in self._removed):
            return None
        if self.changed is None or full in self._dropped:
            return UNKNOWN
        if (place := self._place(full)) is not None:
            try:
                return original_stat(place).st_mode
            except OSError:
                return UNKNOWN
        while True:
            actual = self.changed.find(full)
            read = original_stat if follows_link or actual != full else _lstat
            try:
                mode = None if actual is None else read(actual).st_mode
            except OSError:
                mode = None
            if self.changed.find(full) == actual:  # rank 0 has not changed it meanwhile
                return mode if self.changed.is_find_certain(full) else UNKNOWN

    def _check_creation(self, full: str, path: Any) -> None:
        """Raise the error of creating a file or folder where something exists, or where this process may not."""
        if self._mode(full) not in (None, UNKNOWN):
            raise_os_error(errno.EEXIST, path)
        self._check_folder(full, path)

    def _check_write(self, full: str, path: Any) -> None:
        """Raise the error of opening a path for writing, if it is a folder or this process may not write to it."""
        mode = self._mode(full, follows_link=True)
        if mode is None or (mode == UNKNOWN and not os.path.isdir(full)):
            self._check_folder(full, path, for_change=mode is None)
        elif mode == UNKNOWN or stat.S_ISDIR(mode):
            raise_os_error(errno.EISDIR, path)
        elif not original_access(self._find(path), os.W_OK):
            raise_os_error(errno.EACCES, path)

    def _check_removal(self, full: str, path: Any, *, of_folder: bool) -> None:
        """Raise the error of removing a file, or an empty folder, where there is none."""
        mode = self._mode(full)
        if mode is None:
            raise_os_error(errno.ENOENT, path)
        if mode == UNKNOWN:
            return
        if of_folder != stat.S_ISDIR(mode):
            raise_os_error(errno.ENOTDIR if of_folder else errno.EISDIR, path)
        if of_folder and self._entries(full):
            raise_os_error(errno.ENOTEMPTY, path)
        self._check_folder(full, path)

    def _check_tree(self, full: str, path: Any) -> None:
        """Raise the error of removing a folder and all in it, where there is none."""
        mode = self._mode(full)
        if mode is None:
            raise_os_error(errno.ENOENT, path)
        if mode != UNKNOWN and not stat.S_ISDIR(mode):
            raise_os_error(errno.ENOTDIR, path)

    def _check_renaming(self, old: str, new: str, src: Any, dst: Any) -> None:
        """Raise the error of renaming a path that is absent, or to one of another kind or in an absent folder."""
        mode, replaced = self._mode(old), self._mode(new)
        if mode is None:
            raise_os_error(errno.ENOENT, src, dst)
        self._check_folder(old, src, dst)
        self._check_folder(new, src, dst)
        if UNKNOWN in (mode, replaced) or replaced is None:
            return
        is_folder = stat.S_ISDIR(mode)
        if is_folder != stat.S_ISDIR(replaced):
            raise_os_error(errno.ENOTDIR if is_folder else errno.EISDIR, src, dst)
        if is_folder and old != new and self._entries(new):
            raise_os_error(errno.ENOTEMPTY, src, dst)

    def _check_folder(self, full: str, path: Any, other: Any = None, *, for_change: bool = True) -> None:
        """Raise the error of a path in a folder that is absent or, ``for_change``, that this process may not change."""
        folder = os.path.dirname(full)
        mode = self._mode(folder, follows_link=True)
        if mode is None or (mode == UNKNOWN and not os.path.isdir(folder)):
            raise_os_error(errno.ENOENT, path, other)
        if mode == UNKNOWN or folder in self._folders:
            return
        if not stat.S_ISDIR(mode):
            raise_os_error(errno.ENOTDIR, path, other)
        if for_change and not original_access(self._find(folder), os.W_OK | os.X_OK):
            raise_os_error(errno.EACCES, path, other)

    def _hide(self, full: str) -> None:
        """Treat a path, and all in it, as removed on this rank."""
        for path in [path for path in self._files if is_in(path, full)]:
            self._files.pop(path).close()
        for paths in (self._renamed, self._links):
            for path in [path for path in paths if is_in(path, full)]:
                del paths[path]
        for paths in (self._folders, self._dropped):
            paths -= {path for path in paths if is_in(path, full)}
        self._removed.add(full)

    def _add_folders(self, paths: Iterable[str]) -> None:
        self._folders.update(paths)
        if self.changed is not None:
            for path in paths:
                self.changed.use_present(path)

    def _is_removed(self, full: str) -> bool:
        return any(is_in(full, path) for path in self._removed) or self._is_ahead(full)

    def _is_ahead(self, full: str) -> bool:
        """Return whether rank 0 has created a path that this rank has neither reached nor created itself."""
        is_own = full in self._files or full in self._folders or full in self._links or self._place(full) is not None
        return self._is_active and self.changed is not None and not is_own and self.changed.find(full) is None


class _Entry:
    """Entry of `os.scandir` for a file or folder that exists for this rank only."""

    def __init__(self, folder: str, name: str, is_folder: bool, *, is_link: bool = False) -> None:
        self.path, self.name = os.path.join(folder, name), name
        self._is_folder, self._is_link = is_folder, is_link

    def __fspath__(self) -> str:
        return self.path

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a file."""
        return not self._is_folder and (follow_symlinks or not self._is_link)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder."""
        return self._is_folder and (follow_symlinks or not self._is_link)

    def is_symlink(self) -> bool:
        """Return whether it is a link."""
        return self._is_link

    def is_junction(self) -> bool:
        """Return False: none of these is a junction."""
        return False

    def inode(self) -> int:
        """Return the inode's number."""
        return self.stat().st_ino

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the status of the inode."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)


# The original functions, for use inside of replacements.
original_access, original_stat, _lstat, _scandir, _listdir = os.access, os.stat, os.lstat, os.scandir, os.listdir


def exists_as_folder(full: str) -> bool:
    """Return whether a path itself is a folder, whatever this rank finds there."""
    try:
        return stat.S_ISDIR(original_stat(full).st_mode)
    except OSError:
        return False


def exists(full: str) -> bool:
    """Return whether a path itself exists, whatever this rank finds there."""
    try:
        original_stat(full)
    except OSError:
        return False
    return True


def _identity(full: str) -> tuple[int, int] | None:
    try:
        status = original_stat(full)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def descriptor_path(file: io.FileIO) -> str:
    """Return the path by which this process opens a file that has no name."""
    return f"/proc/self/fd/{file.fileno()}"


def raise_os_error(number: int, path: Any, other: Any = None) -> NoReturn:
    """Raise the OSError of a number, with the path, or both paths of a renaming."""
    second = () if other is None else (None, os.fsdecode(other))
    raise OSError(number, os.strerror(number), os.fsdecode(path), *second)


def is_in(path: str, folder: str) -> bool:
    """Return whether a path is a folder, or in it."""
    return path == folder or path.startswith(folder + os.sep)
