"""``python -m accel_nb.cli`` is ``accel-nb``."""

import sys

from accel_nb.cli.main import main

sys.exit(main())
