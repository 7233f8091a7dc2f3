"""The start of a program that finds accel_nb as accelerate.

``python -m accel_nb.compat.program SCRIPT|-m MODULE [ARGUMENTS]``
"""

from __future__ import annotations

import os
import runpy
import sys

from accel_nb.compat.names.finder import install


def main() -> None:
    """Run the script or the module that the command line names, with its arguments, as Python itself does."""
    words = sys.argv[1:]
    if words in ([], ["-m"]):
        sys.exit("python -m accel_nb.compat.program needs a script, or -m and a module")
    install()
    if words[:1] == ["-m"]:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
