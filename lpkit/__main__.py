import sys

from lpkit.cli import main

sys.exit(main())
