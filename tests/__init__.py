"""Proof. The lessons lie beside the notebooks, where a kernel finds them; here they are found,
too."""

import sys
from pathlib import Path

if (NOTEBOOKS := str(Path(__file__).parents[1] / "notebooks")) not in sys.path:
    sys.path.append(NOTEBOOKS)
