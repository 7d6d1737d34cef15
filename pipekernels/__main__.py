"""``python -m pipekernels``."""

import sys

from pipekernels.cli import main

sys.exit(main())
