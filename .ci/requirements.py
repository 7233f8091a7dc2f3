"""Print the requirements of the package and of the extras named, one a line, to install them before the package."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import pip._vendor.tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = [requirement for name in sys.argv[1:] for requirement in project["optional-dependencies"][name]]
print("\n".join([*project["dependencies"], *extras]))
