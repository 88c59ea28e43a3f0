"""Tensors in files: what is written one at a time is what safetensors reads, in one file or in several."""

import hashlib
import json
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from pipeline.errors import RunError
from pipeline.runs.tensors import (
    INDEX_SUFFIX,
    TensorReader,
    TensorShape,
    TensorWriter,
    file_name,
    shares,
    tensor_files,
    write_index,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (), (7,), (2, 0), (2, 3, 4)]
    drawn = [torch.randn(shape, generator=generator) * 100 for shape in shapes]
    return {f"layer.{i}/{dtype}": each.to(dtype) for i, each in enumerate(drawn) for dtype in DTYPES}


def shape_of(tensor):
    return TensorShape(tuple(tensor.shape), tensor.dtype)


def write(path, content):
    with TensorWriter(path, {name: shape_of(each) for name, each in content.items()}) as writer:
        for name, each in content.items():
            writer.write(name, each)
    return writer


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each), name


def test_safetensors_reads_what_is_written(tmp_path):
    content = tensors()
    path = tmp_path / "model.safetensors"
    writer = write(path, content)
    assert_same(load_file(path), content)
    assert writer.size == path.stat().st_size
    assert writer.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert_same(TensorReader(tmp_path, "model"), content)


def test_views_are_written_as_they_look(tmp_path):
    content = {"turned": torch.arange(12.0).view(3, 4).t(), "part": torch.arange(12.0)[2:7:2]}
    write(tmp_path / "model.safetensors", content)
    assert_same(load_file(tmp_path / "model.safetensors"), content)


def test_parts_and_their_index(tmp_path):
    content = tensors()
    parts = shares({name: shape_of(each).bytes for name, each in content.items()}, 3)
    files = {}
    for number, part in enumerate(parts):
        name = file_name("optimizer", number, 3)
        write(tmp_path / name, {key: content[key] for key in part})
        files[name] = {key: shape_of(content[key]) for key in part}
    write_index(tmp_path / f"optimizer{INDEX_SUFFIX}", files)
    assert tensor_files(tmp_path, "optimizer") == sorted(files)
    reader = TensorReader(tmp_path, "optimizer")
    assert_same(reader, content)
    assert {name: reader.shape(name) for name in reader} == {name: shape_of(each) for name, each in content.items()}
    index = json.loads((tmp_path / f"optimizer{INDEX_SUFFIX}").read_text())
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in content.values())


@given(st.dictionaries(st.text(min_size=1), st.integers(0, 1000)), st.integers(1, 9))
def test_shares_are_fair(sizes, parts):
    found = shares(sizes, parts)
    assert len(found) == parts
    assert sorted(name for part in found for name in part) == sorted(sizes)
    loads = [sum(sizes[name] for name in part) for part in found]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


def test_no_more_than_one_tensor_is_held(tmp_path):
    """Neither while they are written nor while they are read."""
    size, count = 1 << 18, 16  # floats of each
    shapes = {str(number): TensorShape((size,)) for number in range(count)}
    tracemalloc.start()  # which sees the bytes that Python and numpy hold; torch's are held by one name here
    with TensorWriter(tmp_path / "model.safetensors", shapes) as writer:
        for name in shapes:
            writer.write(name, torch.full((size,), float(name)))
    reader = TensorReader(tmp_path, "model")
    for name in shapes:
        assert float(reader[name][0]) == float(name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 4 * size


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("b", torch.zeros(2)), ("a", torch.zeros(3)), ("a", torch.zeros(2, dtype=torch.float64))],
    ids=["name", "shape", "dtype"],
)
def test_what_was_not_announced_is_refused(tmp_path, name, tensor):
    shapes = {"a": TensorShape((2,)), "b": TensorShape((2,))}
    with pytest.raises(ValueError, match="instead of a"), TensorWriter(tmp_path / "x", shapes) as writer:
        writer.write(name, tensor)


def test_a_missing_tensor_is_noticed(tmp_path):
    with pytest.raises(ValueError, match="a was not written"), TensorWriter(tmp_path / "x", {"a": TensorShape((2,))}):
        pass


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "holds neither model.safetensors nor"),
        ("{", "cannot be read"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "outside its folder"),
        ('{"weight_map": {"a": "b.safetensors"}}', "b.safetensors cannot be read"),
    ],
)
def test_damage_is_named(tmp_path, content, told):
    if content is not None:
        (tmp_path / f"model{INDEX_SUFFIX}").write_text(content)
    with pytest.raises(RunError, match=told):
        TensorReader(tmp_path, "model")
