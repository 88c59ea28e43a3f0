"""Corpora and prepared folders that tests share."""

import pytest

from pipeline.data.prepare import prepare
from tests.data.small_corpora import config_for, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def prepared(corpus, tmp_path_factory):
    """A folder of byte tokens in several shards and members; tests must not change it."""
    output = tmp_path_factory.mktemp("prepared") / "data"
    prepare(config_for(output, corpus, holdout={"validation": 0.2}))
    return output
