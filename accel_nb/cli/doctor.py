"""``accel-nb doctor``: what was found on this machine, and what will bite."""

from collections.abc import Sequence

from accel_nb.errors import ConfigError
from accel_nb.notebook.doctor import report


def run(words: Sequence[str]) -> str:
    """Return the report; raises `ConfigError` for arguments, since it takes none."""
    if words:
        raise ConfigError(f"{' '.join(words)!a}: the command takes no arguments; remove them")
    return report()
