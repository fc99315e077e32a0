"""`python -m mmlab` is the command line."""

import sys

from mmlab.cli import main

sys.exit(main())
