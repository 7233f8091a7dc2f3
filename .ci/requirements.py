"""Print what the package and an extra of it (``dev`` if none is named) need, so that it can be installed before it."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import pip._vendor.tomli as tomllib

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extra = sys.argv[1] if len(sys.argv) > 1 else "dev"
print("\n".join([*project["dependencies"], *project["optional-dependencies"][extra]]))
