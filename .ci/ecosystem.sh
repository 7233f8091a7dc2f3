#!/usr/bin/env bash
# Make the environment of the ecosystem's tests: .ci/ecosystem.sh PYTHON FOLDER. It sees the packages of PYTHON's own, and
# is made anew only when .ci/ecosystem.txt has changed.
set -euo pipefail
python="$1" folder="$2" wanted="$(dirname "$0")/ecosystem.txt"

packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
see() { echo "import site; site.addsitedir('$(packages "$python")')" >"$(packages "$folder/bin/python")/project.pth"; }

if ! cmp -s "$wanted" "$folder/complete"; then
    "$python" -m venv --without-pip --clear "$folder"
    see
    "$python" -m pip --disable-pip-version-check --python "$folder/bin/python" install --requirement "$wanted"
    cp "$wanted" "$folder/complete"
fi
see
