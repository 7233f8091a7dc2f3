"""The order of what a cell prints and displays, which come to the kernel by different ways."""

from __future__ import annotations

from collections.abc import Iterator

from tests.notebook.cells import setup

PRINTS = """%%accelerate --cpus 2 --no-panel
import sys
from IPython.display import clear_output, display
for number in range(300):
    {0}
    print("step", number, file=sys.{1})
"""


def outputs(kernel, code: str) -> Iterator[str]:
    """Yield what a page shows in a cell's output, in order; ``clear`` for a request to clear it."""
    sent = kernel.client.execute(code)
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        kind, content = message["msg_type"], message["content"]
        if message["parent_header"].get("msg_id") != sent:
            continue
        if kind == "status" and content["execution_state"] == "idle":
            break
        if kind == "stream":
            yield from content["text"].splitlines()
        elif kind == "display_data":
            yield content["data"]["text/plain"]
        elif kind == "clear_output":
            yield "clear"
    kernel.client.get_shell_msg(timeout=60)


def test_text_and_displays_are_in_the_order_of_the_cell(kernel):
    setup(kernel, "%load_ext accel_nb")
    for stream in ("stdout", "stderr"):
        shown = list(outputs(kernel, PRINTS.format("display(number)", stream)))
        assert [line for line in shown if "workers" not in line] == [
            line for number in range(300) for line in (str(number), f"step {number}")
        ]


def test_text_that_follows_a_cleared_output_stays(kernel):
    shown = list(outputs(kernel, PRINTS.format("clear_output(wait=True)", "stdout")))
    assert shown[-2:] == ["clear", "step 299"]


def test_displays_arrive_while_the_output_is_directed_elsewhere(kernel):
    setup(kernel, "import os, tempfile\nfolder = tempfile.TemporaryDirectory()\npath = folder.name + '/text'")
    cell = """%%accelerate --cpus 2 --no-panel
import sys
class Lines:
    def write(self, text): pass
sys.stderr, kept_stream, kept = Lines(), sys.stderr, os.dup(1)
with open(path, "wb") as file:
    os.dup2(file.fileno(), 1)
    print("to the file")
    display("shown")
    sys.stdout.flush()
    os.dup2(kept, 1)
sys.stderr = kept_stream
print("to the cell")
"""
    assert sorted(list(outputs(kernel, cell))[-2:]) == ["'shown'", "to the cell"]
    assert kernel.value("open(path, 'rb').read()") == b"to the file\n"
