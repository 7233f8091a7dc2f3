"""``accel-nb demo``: run the quickstart notebook in a kernel and save it, with its pictures, to a folder."""

from __future__ import annotations

import argparse
import base64
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accel_nb.cli.command_failed import CommandFailed
from accel_nb.cli.parser import CommandParser
from accel_nb.errors import ConfigError

QUICKSTART = Path("notebooks/01_quickstart.ipynb")
CELL_TIMEOUT_S = 300
RESULT_WORDS = ("accuracy", "loss on")
"""Printed lines that begin with one of these are results, which the summary contains."""


def run(words: Sequence[str]) -> str:
    """Execute the notebook and return a summary. Raise DemoFailed if it does not exist or a cell raises."""
    options = _parse_arguments(words)
    source = _find_notebook(options.notebook)
    out = Path(options.out)
    target = out / source.name
    if target.resolve() == source.resolve():
        raise ConfigError(f"--out {options.out} is the notebook's own folder; the demo does not overwrite its source")
    out.mkdir(parents=True, exist_ok=True)
    is_picture = re.compile(rf"{re.escape(source.stem)}-[0-9]+\.png").fullmatch
    for old in out.iterdir():
        if is_picture(old.name):
            old.unlink()
    started = time.monotonic()
    notebook, problem = _execute(source)
    seconds = time.monotonic() - started
    _save(notebook, target)
    pictures = [_write_picture(target, number, data) for number, data in enumerate(_pictures(notebook), 1)]
    lines = [f"notebook  {target}", *(f"picture   {picture}" for picture in pictures), *_results(notebook)]
    if problem is not None:
        raise DemoFailed("\n".join([*lines, f"the notebook failed after {seconds:.0f} s:", problem]))
    return "\n".join([*lines, f"run time  {seconds:.1f} s"]) + "\n"


class DemoFailed(CommandFailed):
    """The notebook does not exist, or a cell raised; the message has the remedy, or the error and the output's path."""

    is_error_output = True


def _parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="accel-nb demo", description="Run the quickstart notebook and save it with its pictures."
    )
    parser.add_argument("--notebook", metavar="PATH", help=f"the notebook to run (default: {QUICKSTART})")
    parser.add_argument("--out", metavar="DIR", default="out/demo", help="the folder of the result (default: out/demo)")
    return parser.parse_args(words)


def _find_notebook(given: str | None) -> Path:
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise DemoFailed(f"--notebook {given}: there is no such file")
        return path
    checkout = Path(__file__).parents[2]
    for folder in (Path(), checkout):
        if (folder / QUICKSTART).is_file():
            return folder / QUICKSTART
    raise DemoFailed(
        f"{QUICKSTART} does not exist: run this in the project's folder, or name a notebook with --notebook PATH"
    )


def _execute(path: Path) -> tuple[Any, str | None]:
    """Run a notebook with this interpreter as its kernel; return it with outputs, and the error if a cell raised."""
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    class OwnKernelManager(AsyncKernelManager):
        """Starts this interpreter instead of the installed kernel whose name is in the notebook."""

        @property
        def kernel_spec(self) -> KernelSpec:
            command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
            return KernelSpec(argv=command, display_name="Python 3", language="python")

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        store_widget_state=False,
        coalesce_streams=True,
        kernel_manager_class=OwnKernelManager,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.km = client.create_kernel_manager()
    try:
        with TemporaryDirectory(prefix="accel-nb-") as folder:
            # Jupyter finds free TCP ports before the kernel starts: another process may bind one of them meanwhile.
            client.km.transport, client.km.ip = "ipc", str(Path(folder) / "channel")
            client.execute()
    except CellExecutionError as error:
        return notebook, f"{error.ename}: {error.evalue}"
    except (CellTimeoutError, DeadKernelError) as error:
        return notebook, str(error).strip()
    return notebook, None


def _save(notebook: Any, path: Path) -> None:
    import nbformat

    nbformat.write(notebook, path)


def _outputs(notebook: Any) -> Iterator[Any]:
    for cell in notebook.cells:
        yield from cell.get("outputs", ())


def _pictures(notebook: Any) -> Iterable[bytes]:
    for output in _outputs(notebook):
        if data := output.get("data", {}).get("image/png"):
            yield base64.b64decode(data)


def _write_picture(notebook: Path, number: int, data: bytes) -> Path:
    path = notebook.with_name(f"{notebook.stem}-{number}.png")
    path.write_bytes(data)
    return path


def _results(notebook: Any) -> list[str]:
    printed = [line for output in _outputs(notebook) for line in output.get("text", "").splitlines()]
    return [line for line in printed if line.startswith(RESULT_WORDS)]
