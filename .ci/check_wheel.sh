#!/usr/bin/env bash
# Build the wheel and look at it the way a user gets it: in a fresh environment, with no Node.js to be found.
#
# The fresh environment reads the packages of the development environment through a .pth file instead of installing
# two gigabytes again; accel_nb itself and its JupyterLab files come from the wheel alone, because they are installed
# into the fresh environment and because JupyterLab looks for prebuilt extensions only below its own prefix.
set -euo pipefail
cd "$(dirname "$0")/.."

python="$PWD/.venv/bin/python"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# An editable install that is repeated writes this file through the link into the built files; the wheel has its own.
rm -f accel_nb/labextension/install.json

# Without the built files the hook builds them; with them it packs them. They are fresh: `make` has just built them.
"$python" -m build --no-isolation --wheel --outdir "$work/dist" . >"$work/build.log" 2>&1 || {
    cat "$work/build.log" >&2
    exit 1
}
wheel="$(ls "$work"/dist/*.whl)"

"$python" - "$wheel" <<'PYTHON'
import json, sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
names = wheel.namelist()
data = next(name.split("/")[0] for name in names if ".data/" in name)
metadata = next(name.split("/")[0] for name in names if ".dist-info/" in name)
front_end = f"{data}/data/share/jupyter/labextensions/accel-nb"
wanted = [
    "accel_nb/py.typed",
    "accel_nb/ui/static/widget.js",
    f"{metadata}/licenses/LICENSE",
    f"{front_end}/package.json",
    f"{front_end}/install.json",
]
missing = [name for name in wanted if name not in names]
twice = [name for name in names if name.startswith("accel_nb/labextension/")]
foreign = [name for name in names if name.startswith(("tests/", "labextension/", "node_modules/", "benchmarks/"))]
assert not missing, f"missing from the wheel: {missing}"
assert not twice and not foreign, f"should not be in the wheel: {(twice + foreign)[:5]}"
version = json.loads(wheel.read(f"{front_end}/package.json"))["version"]
assert f"accel_nb-{version}-" in sys.argv[1], f"front end {version}, wheel {sys.argv[1]}"
size = wheel.getinfo("accel_nb/ui/static/widget.js").file_size
assert size <= 150_000, f"widget.js has {size} bytes, more than 150 kB"
PYTHON

"$python" -m venv --without-pip "$work/user"
user="$work/user/bin/python"
# The development environment's packages, but not its .pth files: those hold the editable accel_nb.
site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$user" - "$site" <<'PYTHON'
import pathlib, sys, sysconfig
pathlib.Path(sysconfig.get_path("purelib"), "borrowed.pth").write_text(sys.argv[1] + "\n")
PYTHON
"$python" -m pip --python "$user" --quiet --disable-pip-version-check install --no-index --no-deps --ignore-installed "$wheel"

mkdir "$work/home"
clean=(env -i "HOME=$work/home" "PATH=$work/user/bin" JUPYTER_PREFER_ENV_PATH=1 LC_ALL=C.UTF-8)
if "${clean[@]}" "$user" -c 'import shutil, sys; sys.exit(shutil.which("node") is None)'; then
    echo "Node.js is on the path: this check would prove nothing" >&2
    exit 1
fi
cd "$work"
"${clean[@]}" "$user" - "$work" <<'PYTHON'
import pathlib, sys
import accel_nb
from accel_nb.ui.fallback import find_display_facts
assert pathlib.Path(accel_nb.__file__).is_relative_to(sys.argv[1]), accel_nb.__file__
assert find_display_facts().has_bundle
assert "torch" not in sys.modules
PYTHON
listing="$("${clean[@]}" "$user" -m jupyterlab.labextensions list 2>&1 || true)"
if ! grep -E "accel-nb v.*enabled.*OK" <<<"$listing"; then
    echo "jupyter labextension list does not say OK:" >&2
    echo "$listing" >&2
    exit 1
fi
echo "wheel: $(basename "$wheel"), $(stat -c %s "$wheel") bytes"
