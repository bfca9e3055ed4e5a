"""How many configurations the property-based tests try, and which.

The test command tries some, the same ones each time. ``MUON_TEST_FUZZ=10000`` tries as many, and
``MUON_TEST_FUZZ_SEED`` says which ones.
"""

import os
import unittest
from datetime import timedelta


try:
    import hypothesis
    from hypothesis import strategies as st
except ImportError as error:
    raise unittest.SkipTest("hypothesis is not installed") from error


# Of a collective that pairs up with none.
TIMEOUT = timedelta(seconds=20)


def one_of(*values):
    return st.sampled_from(values)


def fuzz(examples: int, *drawn):
    """A decorator for a test, whose arguments are drawn ``examples`` times by default."""
    seed = os.environ.get("MUON_TEST_FUZZ_SEED")
    settings = hypothesis.settings(
        max_examples=int(os.environ.get("MUON_TEST_FUZZ", examples)),
        # The same ones each time, as hypothesis has it without a seed of its own.
        derandomize=seed is None,
        database=None,
        phases=[hypothesis.Phase.generate],
        # One configuration may make process groups first, or wait for a busy machine.
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    def decorate(test):
        test = hypothesis.given(*drawn)(test)
        if seed:
            test = hypothesis.seed(int(seed))(test)
        return settings(test)

    return decorate
