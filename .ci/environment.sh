#!/usr/bin/env bash
# Make an environment for tests that need many packages: .ci/environment.sh PYTHON FOLDER REQUIREMENTS. It sees the
# packages of PYTHON's own, and is made anew only when the requirements have changed.
set -euo pipefail
python="$1" folder="$2" wanted="$3"

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
see() { echo "import site; site.addsitedir('$(packages "$python")')" >"$(packages "$folder/bin/python")/project.pth"; }

if ! cmp -s "$wanted" "$folder/complete"; then
    "$python" -m venv --without-pip --clear "$folder"
    see
    "$python" -m pip --disable-pip-version-check --python "$folder/bin/python" install --requirement "$wanted"
    cp "$wanted" "$folder/complete"
fi
see
