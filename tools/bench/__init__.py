"""How fast a distributed Muon step is, what it sends, and how both compare with the alternatives.

``python -m tools.bench step`` and ``python -m tools.bench bytes``, by an interpreter whose torch has
the overlay. A time here means nothing by itself: what is reported are ratios, each of two times
taken in the same processes and the same repetition. ``python -m tools.bench scale`` simulates a step on
hundreds of ranks.
"""

import sys

from tools.overlay.repo import ROOT


# The examples start processes, count bytes and print tables, too.
sys.path.append(str(ROOT / "examples"))
