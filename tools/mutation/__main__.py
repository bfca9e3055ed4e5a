"""``python -m tools.mutation``."""

import signal
import sys

from .run import main


if __name__ == "__main__":
    # As an exception, so that the tests of the current fault end, too: they are in another session.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
