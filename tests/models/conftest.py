"""Many tiny products: one thread is fastest, and its sums have one order."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
