"""Memory files of another process, which the kernel opens by their paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_nb.pool.local.shared_payloads import SharedBuffers, SharedRegion
from accel_nb.pool.nodes.opened_files import OfferedFiles, can_open, open_payloads
from accel_nb.pool.payload import MemoryBuffers

LARGE = 2_000_000


def test_large_payloads_are_opened_and_small_ones_are_sent():
    offered = OfferedFiles()
    assert can_open(offered.offer())
    offered.are_readable = True
    region = SharedRegion.create(LARGE)
    region.memory[:3] = b"abc"
    payloads = {
        "small": SharedBuffers.write(b"header", [memoryview(b"x")]),
        "large": SharedBuffers.write(b"header", [memoryview(b"x" * LARGE)]),
        "region": region,
    }
    tables, others = offered.share(payloads)
    assert list(others) == ["small"]

    opened = open_payloads(tables)
    offered.close()
    header, [buffer] = opened["large"].read()
    assert (header, bytes(buffer[-2:]), buffer.nbytes) == (b"header", b"xx", LARGE)
    assert opened["region"].memory[:3] == b"abc"
    for payload in (*opened.values(), *others.values()):
        payload.close()


def test_nothing_is_shared_before_the_kernel_has_read_the_first_file():
    offered = OfferedFiles()
    payload = SharedBuffers.write(b"", [memoryview(b"x" * LARGE)])
    assert offered.share({"data": payload}) == ({}, {"data": payload})
    payload.close()
    offered.close()


def test_a_file_with_another_content_is_no_offer():
    offered, other = OfferedFiles(), OfferedFiles()
    assert not can_open({**offered.offer(), "token": other.offer()["token"]})
    path = offered.offer()["path"]
    offered.close()
    assert not can_open({"path": path, "token": ""})
    other.close()


@pytest.mark.parametrize("path", ["/etc/hosts", "/proc/self/fd/0", "/proc/1/fd/../environ", "", None, 3])
def test_other_paths_are_refused(path):
    assert not can_open({"path": path, "token": ""})
    with pytest.raises(ValueError, match="not the path of a memory file"):
        open_payloads({"data": {"path": path, "table": {"kind": "region", "used_bytes": 0}}})


def test_other_files_of_a_process_are_refused(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    with (tmp_path / "file").open("rb") as file:
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        with pytest.raises(ValueError, match="not the path of a memory file"):
            open_payloads({"data": {"path": path, "table": {"kind": "region", "used_bytes": 100}}})


def test_a_memory_file_that_could_shrink_is_refused():
    descriptor = os.memfd_create("accel_nb_other")
    os.truncate(descriptor, 100)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    with pytest.raises(ValueError, match="not sealed"):
        open_payloads({"data": {"path": path, "table": {"kind": "region", "used_bytes": 100}}})
    os.close(descriptor)


def test_a_payload_of_another_kind_is_sent():
    offered = OfferedFiles()
    offered.are_readable = True
    payload = MemoryBuffers(b"", [memoryview(b"x" * LARGE)])
    assert offered.share({"data": payload}) == ({}, {"data": payload})
    offered.close()
