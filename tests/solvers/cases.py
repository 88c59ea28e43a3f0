"""What tests of solvers run over, every architecture that feeds back, and how they expect refusals."""

import re
from contextlib import contextmanager

import pytest

from pipeline.errors import ConfigError
from pipeline.models import ARCHITECTURES

FEEDING = [cls for cls in ARCHITECTURES.values() if cls.feeds_back]
each_feeding = pytest.mark.parametrize("cls", FEEDING, ids=lambda cls: cls.__name__)


@contextmanager
def refused(words):
    """Expect a ConfigError of one line in which ``words`` stand."""
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        yield
    assert "\n" not in str(caught.value)
