"""`python -m purestep.engine` is the command `purestep`."""

import sys

from purestep.engine.cli import main

sys.exit(main())
