"""Peers are installed beside what is there, never in its place."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from pipeline.bench.peers import installing
from pipeline.bench.peers.codes import CODES
from pipeline.bench.peers.recurrent import PEER
from pipeline.errors import UserError

EXTRAS = tomllib.loads((Path(__file__).resolve().parent.parent.parent / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]


def test_every_peer_is_in_an_extra_and_what_is_installed_alone_is_pinned():
    alone = [Requirement(each) for each in EXTRAS[installing.ALONE]]
    named = {each.name for each in [*alone, *map(Requirement, EXTRAS[installing.WITH_REQUIREMENTS])]}
    assert {PEER, *(code.distribution for code in CODES)} <= named
    assert all(len(each.specifier) == 1 and str(each.specifier).startswith("==") for each in alone)


def test_requirements_are_those_of_the_extra():
    found = installing.requirements("plots")
    assert [Requirement(each).name for each in found] == ["matplotlib"]
    with pytest.raises(UserError, match="names no such-extra"):
        installing.requirements("such-extra")


def test_what_is_installed_stays():
    """What is here in any version is not asked for, and all that is here binds what comes."""
    assert installing.absent("plots") == (["matplotlib>=3.8"] if installing.missing("matplotlib") else [])
    pins = [Requirement(each) for each in installing.installed()]
    versions = {each.name: str(each.specifier).removeprefix("==") for each in pins}
    assert installing.DISTRIBUTION not in versions
    for name in ("torch", "numpy", "lightning"):
        assert versions[name] == installing.version(name).partition("+")[0]
