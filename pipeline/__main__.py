"""``python -m pipeline`` is the command ``backfeed``."""

import sys

from pipeline.cli import main

sys.exit(main())
