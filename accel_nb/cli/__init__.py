"""The command line: ``accel-nb``."""

from accel_nb.cli.main import main as main
