#!/usr/bin/env bash
# Make sure that there are the servers of the tests of engines: OpenSSH's and Slurm's; installs Debian's if it can.
set -euo pipefail

export PATH="$PATH:/usr/sbin:/sbin"
if command -v sshd >/dev/null && command -v slurmctld >/dev/null && command -v munged >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [[ "$(id -u)" -ne 0 ]]; then
    echo "Tests of the ssh and slurm engines are skipped: sshd, slurmctld and munged are not all installed." >&2
    exit 0
fi
apt-get update -q
DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends openssh-server slurm-wlm munge
