"""Every test starts from the same random state, and property tests draw the same examples every time."""

import random
import sys

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("repository", deadline=None, derandomize=True, database=None)
settings.load_profile("repository")


@pytest.fixture(autouse=True)
def seeded():
    """Seed the global generators; tests should still pass generators of their own where they can."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:  # tests of data need no torch
        sys.modules["torch"].manual_seed(0)
