"""Loading, writing and comparing configurations; the exact line of every mistake."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import MISSING, OmegaConf

from pipeline.choices import CHOICE, Choice
from pipeline.config_files import ABSENT, differences, flatten, is_changeable, load, save, to_yaml
from pipeline.config_files.layers import scalar
from pipeline.errors import ConfigError

ROOT = Path(__file__).parents[1]


@dataclass
class Run:
    name: str = MISSING
    """Name of the run. It is also its folder's."""
    root: Path = Path("runs")
    """Where it is."""
    note: str | None = None
    """Anything."""


@dataclass
class Model:
    architecture: str = MISSING
    """Which model. There are two."""
    width: int = 8
    """Width."""


@dataclass
class Attention:
    heads: int = 2
    """Heads."""
    scale: float | None = None
    """Scale."""


@dataclass
class Transformer(Model):
    depth: int = 2
    """Depth."""


@dataclass
class Recurrent(Model):
    width: int = 16
    window: int = MISSING
    """Window. In tokens."""
    attention: Attention = field(default_factory=lambda: Attention(heads=4))
    """Attention."""


@dataclass
class Stage:
    at: float = MISSING
    """Start."""
    value: Any = MISSING
    """Value."""


@dataclass
class Training:
    tokens: int = 100
    """Tokens."""
    rate: float = 1e-3
    """Rate."""
    resume: bool = False
    """Resume."""
    precision: Literal["float32", "bf16-mixed"] = "float32"
    """Precision."""
    tags: list[str] = field(default_factory=list)
    """Tags."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Betas."""
    files: str | list[str] = "all"
    """Files."""

    def check(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"training.tokens is {self.tokens}; it must be at least 1")


def models() -> Mapping[str, type]:
    return {"transformer": Transformer, "rlt": Recurrent}


@dataclass
class Config:
    run: Run = field(default_factory=Run)
    """Run."""
    model: Model = field(default_factory=Model, metadata={CHOICE: Choice("architecture", models)})
    """Model."""
    training: Training = field(default_factory=Training)
    """Training."""
    schedules: dict[str, list[Stage]] = field(default_factory=dict)
    """Schedules."""
    seed: int = 0
    """Seed."""

    def check(self) -> None:
        if self.seed > self.training.tokens:
            raise ConfigError(f"seed is {self.seed}, more than training.tokens={self.training.tokens}")


BASE = ["run.name=a", "model.architecture=transformer"]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file of a folder, which is the current one, and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "x.yaml") -> str:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return name

    return write


def message(files=(), overrides=(), schema=Config) -> str:
    with pytest.raises(ConfigError) as caught:
        load(schema, files, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


# What is right


def test_layers_are_merged_left_to_right_and_overrides_win(write):
    first = write(
        "run: {name: a, note: x}\ntraining: {tokens: 5, tags: [a, b]}\nmodel: {architecture: rlt, window: 3}\n"
    )
    second = write("training: {tags: [c]}\nrun: {name: b}\n", "y.yaml")
    config = load(Config, [first, Path(second)], ["training.tokens=7", "run.note=null", "training.tokens=8"])
    assert config.run == Run("b", Path("runs"), None)
    assert config.training == Training(tokens=8, tags=["c"])
    assert isinstance(config.training.betas, tuple)
    assert config.model == Recurrent("rlt", 16, 3, Attention(4))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.tokens=2e9", 2_000_000_000),
        ("training.tokens=1_000", 1000),
        ("training.rate=1e-4", 1e-4),
        ("training.rate=3", 3.0),
        ("training.resume=true", True),
        ("training.tags=[a, '1']", ["a", "1"]),
        ("training.betas=[0.5, 1]", (0.5, 1.0)),
        ("training.files=b", "b"),
        ("training.files=[b]", ["b"]),
        ("training.precision=bf16-mixed", "bf16-mixed"),
        ("run.name='007'", "007"),
        ('run.name="007"', "007"),
        ("run.name=a=b", "a=b"),
        ("run.name=2024-01-01", "2024-01-01"),
        ("run.root=/tmp", Path("/tmp")),
        ("run.note=", None),
        ("training={tokens: 5, rate: 1}", Training(5, 1.0)),
        ("schedules.k=[{at: 0, value: 4}, {at: 0.5, value: [1]}]", {"k": [Stage(0.0, 4), Stage(0.5, [1])]}),
    ],
)
def test_values(override, value):
    config = load(Config, [], [*BASE, override])
    for part in override.partition("=")[0].split("."):
        if not isinstance(config, dict) and part != "k":
            config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize(
    "text", ["1e-4", "1e4", "1.5", ".5", "1_000", "010", "0x10", "true", "no", "null", "", "2024-01-01", "a", "[1, b]"]
)
def test_scalars_are_omegaconfs(text):
    assert scalar(text) == OmegaConf.from_dotlist([f"a={text}"]).a


def test_the_last_layer_chooses_and_its_defaults_hold(write):
    first = write("model: {architecture: transformer}\nrun: {name: a}\n")
    assert load(Config, [first]).model == Transformer("transformer", 8, 2)
    assert load(Config, [first], ["model.architecture=rlt", "model.window=1"]).model.width == 16


def test_an_optional_section_inside_a_choice_keeps_its_own_defaults():
    overrides = ["run.name=a", "model.architecture=rlt", "model.window=1", "model.attention.scale=2"]
    assert load(Config, [], overrides).model.attention == Attention(4, 2.0)


def test_interpolations_see_defaults_choices_and_the_environment(write, monkeypatch):
    monkeypatch.setenv("RANKS", "3")
    file = write(
        "run: {name: 'run-${model.width}-\\${x}'}\nmodel: {architecture: rlt, window: '${oc.decode:${oc.env:RANKS}}'}\n"
    )
    config = load(Config, [file], ["seed=${training.tokens}"])
    assert (config.run.name, config.seed, config.model.window) == ("run-16-${x}", 100, 3)


def test_a_choice_may_be_an_interpolation():
    config = load(Config, [], ["run.name=rlt", "model.architecture=${run.name}", "model.window=1"])
    assert config.model == Recurrent("rlt", 16, 1, Attention(4))


def test_anchors_and_merge_keys(write):
    file = write("run: {name: a}\nmodel: &m {architecture: transformer, width: 3}\ntraining: {tokens: 5}\n")
    assert load(Config, [file]).model.width == 3
    file = write("schedules: {k: [&s {at: 0, value: 1}, {<<: *s, at: 0.5}]}\n")
    assert load(Config, [file], BASE).schedules["k"] == [Stage(0.0, 1), Stage(0.5, 1)]


def test_an_empty_file_sets_nothing(write):
    assert load(Config, [write("# nothing\n")], BASE) == load(Config, [], BASE)


# What is wrong


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "training:\n  tokns: 5\n",
            "training.tokns (x.yaml:2) is not a setting; did you mean training.tokens? training has: tokens, rate, "
            "resume, precision, tags, betas, files",
        ),
        (
            "width: 5\n",
            "width (x.yaml:1) is not a setting; did you mean model.width? the configuration has: run, model, training, "
            "schedules, seed",
        ),
        (
            "zzz: 5\n",
            "zzz (x.yaml:1) is not a setting; the configuration has: run, model, training, schedules, seed",
        ),
        (
            "model:\n\n  window: 5\n",
            "model.window (x.yaml:3) is not a setting of architecture 'transformer'; it belongs to rlt; transformer "
            "has: architecture, width, depth",
        ),
        (
            "model:\n  dept: 5\n",
            "model.dept (x.yaml:2) is not a setting of architecture 'transformer'; did you mean model.depth? "
            "transformer has: architecture, width, depth",
        ),
        (
            "schedules:\n  k:\n  - {at: 0, value: 1}\n  - {at: 1, valu: 1}\n",
            "schedules.k.1.valu (x.yaml:4) is not a setting; did you mean schedules.k.1.value? schedules.k.1 has: at, "
            "value",
        ),
        ("training: {tokens: 2.5}\n", "training.tokens (x.yaml:1) is 2.5; it must be an integer"),
        (
            "training: {tokens: 1e30}\n",
            "training.tokens (x.yaml:1) is 1.0e+30; it must be an integer: write all its digits, since floats of this "
            "size are not exact",
        ),
        ("training: {rate: .inf}\n", "training.rate (x.yaml:1) is .inf; it must be a finite number"),
        ("training: {tokens: .inf}\n", "training.tokens (x.yaml:1) is .inf; it must be an integer"),
        ("training: {tokens: true}\n", "training.tokens (x.yaml:1) is true; it must be an integer"),
        (
            "training: {tokens: '12'}\n",
            "training.tokens (x.yaml:1) is the text '12'; it must be an integer: write it without quotes: 12",
        ),
        ("training: {tokens: many}\n", "training.tokens (x.yaml:1) is the text 'many'; it must be an integer"),
        ("training: {tokens: null}\n", "training.tokens (x.yaml:1) is null; it must be an integer"),
        ("training: {tokens: {a: 1}}\n", "training.tokens (x.yaml:1) is a section; it must be an integer"),
        ("training: {tokens: [1]}\n", "training.tokens (x.yaml:1) is a list; it must be an integer"),
        (
            'training:\n  rate: "1e-4"\n',
            "training.rate (x.yaml:2) is the text '1e-4'; it must be a number: write it without quotes: 1e-4",
        ),
        ("training: {rate: .nan}\n", "training.rate (x.yaml:1) is .nan; it must be a finite number"),
        ("training: {rate: true}\n", "training.rate (x.yaml:1) is true; it must be a number"),
        (
            "training: {resume: 'yes'}\n",
            "training.resume (x.yaml:1) is the text 'yes'; it must be true or false: write it without quotes: yes",
        ),
        ("training: {resume: 1}\n", "training.resume (x.yaml:1) is 1; it must be true or false"),
        ("run: {name: 7}\n", "run.name (x.yaml:1) is 7; it must be text: put it in quotes"),
        ("run: {name: null}\n", "run.name (x.yaml:1) is null; it must be text"),
        ("run: {root: 7}\n", "run.root (x.yaml:1) is 7; it must be text (a path): put it in quotes"),
        ("run: {note: 7}\n", "run.note (x.yaml:1) is 7; it must be text: put it in quotes"),
        (
            "training: {precision: fp32}\n",
            "training.precision (x.yaml:1) is the text 'fp32'; it must be one of float32, bf16-mixed",
        ),
        (
            "training: {precision: float16}\n",
            "training.precision (x.yaml:1) is the text 'float16'; it must be one of float32, bf16-mixed: did you mean "
            "float32?",
        ),
        (
            "training: {precision: off}\n",
            "training.precision (x.yaml:1) is false; it must be one of float32, bf16-mixed: unquoted on, off, yes and "
            "no are booleans",
        ),
        ("training: {tags: a}\n", "training.tags (x.yaml:1) is the text 'a'; it must be a list (text): write [a]"),
        (
            "training:\n  tags:\n  - a\n  - 1\n",
            "training.tags.1 (x.yaml:4) is 1; it must be text: put it in quotes",
        ),
        (
            "training: {betas: [1]}\n",
            "training.betas (x.yaml:1) is a list; it must be a list (a number, a number) of length 2: its length is 1",
        ),
        ("training: {files: 1}\n", "training.files (x.yaml:1) is 1; it must be text or a list (text)"),
        (
            "training: 5\n",
            "training (x.yaml:1) is 5; it must be a section with tokens, rate, resume, precision, tags, betas, files",
        ),
        (
            "run:\n",
            "run (x.yaml:1) is null; it must be a section with name, root, note: leave the key out to take its "
            "defaults",
        ),
        (
            "schedules: [1]\n",
            "schedules (x.yaml:1) is a list; it must be a mapping from names to values (a list (a section with at, "
            "value))",
        ),
        (
            "seed: '${nothing}'\n",
            "seed (x.yaml:1, from ${nothing}) cannot be resolved: Interpolation key 'nothing' not found",
        ),
        ("seed: '${seed}'\n", "seed (x.yaml:1, from ${seed}) cannot be resolved: Recursive interpolation detected"),
        (
            "training: {tags: ['${nothing.there}']}\n",
            "training.tags.0 (x.yaml:1, from ${nothing.there}) cannot be resolved: Interpolation key 'nothing.there' "
            "not found",
        ),
        (
            "seed: '${oc.env:SEED_TEXT}'\n",
            "seed (x.yaml:1, from ${oc.env:SEED_TEXT}) is the text '12'; it must be an integer: wrap the interpolation "
            "in ${oc.decode:...}",
        ),
        ("training:\n  tokens: 0\n", "training.tokens (x.yaml:2) is 0; it must be at least 1"),
        ("training: {tokens: 3}\nseed: 4\n", "seed (x.yaml:2) is 4, more than training.tokens=3"),
    ],
)
def test_mistakes_in_a_file(write, monkeypatch, text, expected):
    monkeypatch.setenv("SEED_TEXT", "12")
    base = ["model.architecture=transformer"] + ([] if "name:" in text or text == "run:\n" else ["run.name=a"])
    assert message([write(text)], base) == expected


def test_an_unclosed_interpolation(write):
    text = message([write("seed: '${'\n")], BASE)
    assert text.startswith("seed (x.yaml:1, from ${) cannot be resolved: ")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("seed", "command line: 'seed' is not an override; write key=value"),
        ("=5", "command line: '=5' has an empty key; write section.key=value"),
        ("training..tokens=5", "command line: 'training..tokens=5' has an empty key; write section.key=value"),
        ("seed={", "command line: seed={ is not valid YAML: expected the node content, but found '<stream end>'"),
        ("training={a: 1, a: 2}", "command line: training={a: 1, a: 2}: training.a is set twice, first in line 1"),
        ("sed=5", "sed (command line) is not a setting; did you mean seed? the configuration has: run, model, "
                  "training, schedules, seed"),
        ("seed=a", "seed (command line) is the text 'a'; it must be an integer"),
        ("seed.x=1", "seed (command line) is a section; it must be an integer"),
        ("training.tags.0=a", "training.tags (command line) is a section; it must be a list (text)"),
        ("model=rlt", "model (command line) is the text 'rlt'; it must be a section with architecture, width: did you "
                      "mean model.architecture=rlt?"),
        ("model.architecture=rtl", "model.architecture (command line) is the text 'rtl'; it must be one of "
                                   "transformer, rlt: did you mean rlt?"),
        ("model.architecture=null", "model.architecture (command line) is null; it must be one of transformer, rlt"),
        ("model.window=3", "model.window (command line) is not a setting of architecture 'transformer'; it belongs to "
                           "rlt; transformer has: architecture, width, depth"),
        ("run.name=007", "run.name (command line) is 7; it must be text: put it in quotes inside the shell's: "
                         "'\"...\"'"),
        ("training.tokens=-1", "training.tokens (command line) is -1; it must be at least 1"),
        ("training.rate='1e-4'", "training.rate (command line) is the text '1e-4'; it must be a number: write it "
                                 "without quotes: 1e-4"),
    ],
)  # fmt: skip
def test_mistakes_on_the_command_line(override, expected):
    assert message([], [*BASE, override]) == expected


def test_settings_of_the_choice_that_an_override_leaves_are_told_with_their_file(write):
    file = write("run: {name: a}\nmodel:\n  architecture: rlt\n  window: 3\n")
    assert message([file], ["model.architecture=transformer"]).startswith(
        "model.window (x.yaml:4) is not a setting of architecture 'transformer'; it belongs to rlt; "
    )


def test_the_place_is_that_of_the_last_layer(write):
    files = [write("seed: a\n"), write("\nseed: b\n", "y.yaml")]
    assert message(files, BASE) == "seed (y.yaml:2) is the text 'b'; it must be an integer"
    assert load(Config, files, [*BASE, "seed=1"]).seed == 1


def test_all_missing_values_are_told_at_once():
    assert message() == (
        "2 values are missing: run.name: Name of the run; model.architecture: Which model [one of transformer, rlt]"
    )
    assert message(overrides=["model.architecture=rlt", "schedules.k=[{at: 1}]"]) == (
        "3 values are missing: run.name: Name of the run; model.window: Window; schedules.k.0.value: Value"
    )
    assert message(overrides=[*BASE, "run.name=???"]) == "1 value is missing: run.name: Name of the run"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\n", "x.yaml:2:1: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("run:\n  name: a: b\n", "x.yaml:2:10: not valid YAML: mapping values are not allowed here"),
        ("seed: *a\n", "x.yaml:1:7: not valid YAML: found undefined alias 'a'"),
        ("seed: 1\n---\nseed: 2\n", "x.yaml:2:1: not valid YAML: but found another document"),
        ("seed: \x01\n", "x.yaml: not valid YAML: character 6 (0x1) is not allowed"),
        ("schedules: &a {k: *a}\n", "x.yaml: not valid YAML: it is nested too deeply, or an anchor holds itself"),
        ("seed: !!python/object/apply:os.getcwd []\n",
         "x.yaml:1:7: not valid YAML: could not determine a constructor for the tag "
         "'tag:yaml.org,2002:python/object/apply:os.getcwd'"),
        ("seed: !!binary aGk=\n", "x.yaml:1: values of YAML type tag:yaml.org,2002:binary are not supported"),
        ("- a\n", "x.yaml holds a list at its top level; it must be sections of key: value"),
        ("text\n", "x.yaml holds the text 'text' at its top level; it must be sections of key: value"),
        ("null\n", "x.yaml holds null at its top level; it must be sections of key: value"),
        ("seed: 1\nrun:\n  name: a\n  name: b\n", "x.yaml:4: run.name is set twice, first in line 3"),
        ("training.tokens: 5\n",
         "x.yaml:1: the key 'training.tokens' holds a dot; write training: {tokens: ...}"),
        ("'': 5\n", "x.yaml:1: a key is empty"),
        ("[a]: 5\n", "x.yaml:1: a key must be text"),
        ("run: {<<: 5}\n", "x.yaml:1: << needs a mapping, or a list of mappings"),
        (b"\xff\xfe\x00", "x.yaml is not a YAML file: byte 0 is not UTF-8 text"),
    ],
)  # fmt: skip
def test_files_that_are_no_configuration(write, text, expected):
    assert message([write(text)], BASE) == expected


def test_files_that_are_not_there(write, tmp_path):
    assert message(["no.yaml"]) == "no.yaml: no such configuration file"
    Path("folder").mkdir()
    assert message(["folder"]) == "folder is a folder; a YAML file is needed"


# Writing


TEXT = st.text(max_size=20) | st.sampled_from(
    [
        "${a}",
        "\\${a}",
        "\\\\${",
        "x\\",
        "1e-4",
        "null",
        "yes",
        "1:30",
        "2024-01-01",
        "",
        " ",
        "#",
        "a: b",
        "=",
        "<<",
        "~",
    ]
)
KEY = st.text(min_size=1, max_size=8).filter(lambda key: key.strip() and "." not in key)
INTEGER = st.integers(-(2**63), 2**63 - 1)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
ANY = st.recursive(
    st.none() | st.booleans() | INTEGER | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=5,
)
CONFIGS = st.builds(
    Config,
    run=st.builds(Run, name=TEXT, root=TEXT.map(Path), note=st.none() | TEXT),
    model=st.builds(Transformer, architecture=st.just("transformer"), width=INTEGER, depth=INTEGER)
    | st.builds(
        Recurrent,
        architecture=st.just("rlt"),
        width=INTEGER,
        window=INTEGER,
        attention=st.builds(Attention, heads=INTEGER, scale=st.none() | NUMBER),
    ),
    training=st.builds(
        Training,
        tokens=st.integers(1, 2**63 - 1),
        rate=NUMBER,
        resume=st.booleans(),
        precision=st.sampled_from(["float32", "bf16-mixed"]),
        tags=st.lists(TEXT, max_size=3),
        betas=st.tuples(NUMBER, NUMBER),
        files=TEXT | st.lists(TEXT, max_size=2),
    ),
    schedules=st.dictionaries(KEY, st.lists(st.builds(Stage, at=NUMBER, value=ANY), max_size=2), max_size=2),
    seed=st.integers(-(2**63), 0),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(CONFIGS)
def test_what_is_written_loads_as_it_was(tmp_path_factory, config):
    file = tmp_path_factory.getbasetemp() / "round.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    again = load(Config, [file])
    assert again == config
    assert differences(again, config) == []
    assert to_yaml(again) == to_yaml(config)
    assert all(isinstance(value, bool | int | float | str | None) for value in flatten(config).values())


def test_yaml_is_plain_and_in_the_order_of_the_schema():
    config = load(Config, [], [*BASE, "training.rate=1e-4", "schedules.k=[{at: 0, value: 4}]", "seed=${model.width}"])
    assert to_yaml(config) == (
        "run:\n  name: a\n  root: runs\n  note: null\n"
        "model:\n  architecture: transformer\n  width: 8\n  depth: 2\n"
        "training:\n  tokens: 100\n  rate: 0.0001\n  resume: false\n  precision: float32\n  tags: []\n"
        "  betas:\n  - 0.9\n  - 0.95\n  files: all\n"
        "schedules:\n  k:\n  - at: 0.0\n    value: 4\nseed: 8\n"
    )


def test_save_writes_what_load_reads(tmp_path):
    config = load(Config, [], BASE)
    save(config, tmp_path / "config.yaml")
    assert load(Config, [tmp_path / "config.yaml"]) == config
    assert [item.name for item in tmp_path.iterdir()] == ["config.yaml"]


# Comparing


def test_differences_between_equal_choices():
    first = load(Config, [], [*BASE, "training.tags=[a]", "schedules.k=[{at: 0, value: 1}]"])
    second = load(Config, [], [*BASE, "seed=3", "schedules.j=[]"])
    assert differences(first, second) == [
        ("training.tags", ["a"], []),
        ("schedules.k", [{"at": 0.0, "value": 1}], ABSENT),
        ("schedules.j", ABSENT, []),
        ("seed", 0, 3),
    ]
    assert differences(first, first) == []
    assert repr(ABSENT) == "(not set)"


def test_differences_between_choices():
    first = load(Config, [], BASE)
    second = load(Config, [], ["run.name=a", "model.architecture=rlt", "model.window=3"])
    assert differences(first, second) == [
        ("model.architecture", "transformer", "rlt"),
        ("model.width", 8, 16),
        ("model.depth", 2, ABSENT),
        ("model.window", ABSENT, 3),
        ("model.attention.heads", ABSENT, 4),
        ("model.attention.scale", ABSENT, None),
    ]


@pytest.mark.parametrize(
    ("key", "allowed", "result"),
    [
        ("data.path", ["data.path"], True),
        ("logging.wandb.mode", ["run", "logging"], True),
        ("logging_extra", ["logging"], False),
        ("data", ["data.path"], False),
        ("data.path", [], False),
    ],
)
def test_is_changeable(key, allowed, result):
    assert is_changeable(key, allowed) is result


def test_flatten():
    config = load(Config, [], [*BASE, "training.tags=[ä]", "schedules.k=[{at: 0, value: 1}]"])
    flat = flatten(config)
    assert flat["run.root"] == "runs"
    assert flat["training.tags"] == '["ä"]'
    assert flat["training.betas"] == "[0.9, 0.95]"
    assert flat["schedules.k"] == '[{"at": 0.0, "value": 1}]'
    assert flatten(load(Config, [], BASE))["schedules"] == "{}"


# The project


def test_neither_torch_nor_lightning_is_imported():
    code = "import pipeline.config_files, sys; sys.exit(bool({'torch', 'lightning'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "data").glob("*.yaml")), ids=lambda file: file.name)
def test_every_data_set_in_configs_loads(file):
    from pipeline.data.prepare import PrepareConfig

    assert to_yaml(load(PrepareConfig, [file]))
