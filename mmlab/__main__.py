"""`python -m mmlab` is the command line."""

import sys

from mmlab.cli.main import main

sys.exit(main())
