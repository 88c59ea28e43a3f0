"""Every test starts from the same random state, and property tests draw the same examples every time."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings

# Many tiny products: one thread is fastest, and its sums have one order.
torch.set_num_threads(1)
settings.register_profile("repository", deadline=None, derandomize=True, database=None)
settings.load_profile("repository")


@pytest.fixture(autouse=True)
def seeded():
    """Seed the global generators; tests should still pass generators of their own where they can."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
