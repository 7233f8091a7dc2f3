#!/usr/bin/env bash
# Make sure that there is a Chromium for the browser tests; installs Debian's when there is none.
set -euo pipefail

for browser in "${CHROMIUM_PATH:-}" "$(command -v chromium || true)" "$(command -v chromium-browser || true)"; do
    if [[ -n "$browser" && -x "$browser" ]]; then
        exit 0
    fi
done

hint="Install Chromium, or set CHROMIUM_PATH to the program of a Chromium or Chrome that you have."
if ! command -v apt-get >/dev/null; then
    echo "The browser tests need Chromium, and there is no apt-get here to install it. $hint" >&2
    exit 1
fi
as_root=()
if [[ "$(id -u)" -ne 0 ]]; then
    if ! command -v sudo >/dev/null; then
        echo "The browser tests need Chromium; installing it needs root, and there is no sudo. $hint" >&2
        exit 1
    fi
    as_root=(sudo)
fi
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core
