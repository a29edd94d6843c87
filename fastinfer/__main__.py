"""`python -m fastinfer`."""

import sys

from fastinfer.cli import main

sys.exit(main())
