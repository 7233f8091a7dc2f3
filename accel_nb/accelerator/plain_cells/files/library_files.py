"""Functions of libraries that read or write a file in C code, for the redirection of files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class FileFunction:
    """A function with the path of a file among its arguments.

    ``use``: ``open`` takes the path and a mode, as Python's function does; ``write by name`` writes a whole file in the
    form that the path's extension means.
    """

    module: str
    name: str
    use: Literal["open", "read", "write", "write by name"]
    position: int
    """The position of the path among the arguments."""
    argument: str
    """The name of the path's parameter."""

    def owner(self) -> Any:
        """Return the module or the class that has the function; None if it is not there."""
        owner: Any = sys.modules.get(self.module)
        for name in self.name.split(".")[:-1]:
            owner = getattr(owner, name, None)
        return owner

    @property
    def own_name(self) -> str:
        """The function's name in its owner."""
        return self.name.rpartition(".")[2]


SAFETENSORS = ("safetensors.numpy", "safetensors.torch")
"""The modules that import `serialize_file` by name, and call it to write."""

_SAFE_OPEN = (
    "safetensors",
    *SAFETENSORS,
    "transformers.integrations.accelerate",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
    "transformers.quantizers.quantizer_torchao",
)
"""The modules that import `safe_open` by name."""

_FUNCTIONS = (
    FileFunction("cv2", "imread", "read", 0, "filename"),
    FileFunction("cv2", "imwrite", "write by name", 0, "filename"),
    FileFunction("pandas", "read_parquet", "read", 0, "path"),
    FileFunction("pyarrow", "OSFile", "open", 0, "path"),  # pandas writes Parquet to it
    FileFunction("pyarrow.feather", "read_table", "read", 0, "source"),
    FileFunction("pyarrow.feather", "write_feather", "write", 1, "dest"),
    FileFunction("pyarrow.parquet", "ParquetFile.__init__", "read", 1, "source"),
    FileFunction("pyarrow.parquet", "ParquetWriter.__init__", "write", 1, "where"),
    FileFunction("pyarrow.parquet", "read_table", "read", 0, "source"),
    *(FileFunction(module, "safe_open", "read", 0, "filename") for module in _SAFE_OPEN),
)
"""Functions that read are listed for each library whose functions that write are redirected, so that ranks read their
own files. Parquet files that pandas reads, it writes by pyarrow."""

LIBRARIES = frozenset({"h5py", *SAFETENSORS, *(function.module for function in _FUNCTIONS)})
"""The modules with functions that are redirected."""


def imported_functions() -> Iterator[FileFunction]:
    """Yield the functions of the modules that this process has imported.

    An entry is skipped if the loaded module lacks the function, such as a user's module of the same name.
    """
    for function in _FUNCTIONS:
        owner = function.owner()
        if owner is not None and hasattr(owner, function.own_name):
            yield function
