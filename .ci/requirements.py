"""Print what the package and its development need, so that they can be installed before the package is built."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import pip._vendor.tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print("\n".join([*project["dependencies"], *project["optional-dependencies"]["dev"]]))
