#!/usr/bin/env python3
"""Distributed Muon for PyTorch: the command line. Its parts are in tools/overlay."""

import os
import sys


# PYTHONSAFEPATH leaves it out.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
if sys.version_info < (3, 10):  # noqa: UP036
    # Said before the first import: those modules do not even parse on an older one.
    sys.stderr.write(
        "error: Python 3.10 or later is needed, this is " + sys.version + "\n"
    )
    sys.exit(2)

if __name__ == "__main__":
    try:
        # The imports take long enough for a Ctrl-C to arrive in them.
        from tools.overlay.cli import main

        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        code = 130
    sys.exit(code)
