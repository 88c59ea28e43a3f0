"""What is freed after a step is there for the next."""

import platform
import subprocess
import sys

import pytest

CODE = """
import resource
import torch
from pipeline.training.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(1 << 24).add_(1)  # 16384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults(), keep_freed_memory(), [faults() for _ in range(6)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_pages_are_made_once():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    plain, can, kept = done.stdout.split()
    assert can == "True"
    assert int(kept) < 100 < 4000 < int(plain)
