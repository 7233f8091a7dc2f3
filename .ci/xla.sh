#!/usr/bin/env bash
# Make the environment in which PyTorch/XLA is tested: xla.sh PYTHON FOLDER. Its torch is another one than the project's.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1" folder="$2"

[[ -x "$folder/bin/python" ]] || "$python" -m venv "$folder" || { rm -rf "$folder"; exit 1; }
pip=("$folder/bin/python" -m pip --disable-pip-version-check install)
wanted() { "$folder/bin/python" .ci/requirements.py "$@"; }

# Without the packages of CUDA, some 4 GB, this torch does not load, though nothing here uses them.
"${pip[@]}" --constraint <(grep -v '^torch' .ci/constraints.txt) \
    --requirement <(wanted xla) pytest pytest-timeout scikit-learn
touch "$folder/.installed"
