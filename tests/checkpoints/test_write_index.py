"""torch, Megatron and our own reader read our index as they read the one that torch writes."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megatron_nemotron3.checkpoints.metadata import (
    ITEM_SIZE,
    CheckpointIndex,
    DistTensor,
    StoredObject,
    TensorChunk,
    read_metadata,
)
from megatron_nemotron3.checkpoints.write import COMMON_OBJECT, CONFIG_TEXT
from tests.support.checkpoint_writer import index_bytes, tensors, write


def roundtrip(folder: Path, stored: dict[str, DistTensor], objects: dict[str, StoredObject]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / ".metadata").write_bytes(index_bytes(stored, objects))
    found = read_metadata(folder)
    assert found == CheckpointIndex(folder, stored, objects)
    assert (list(found.tensors), list(found.objects)) == (list(stored), list(objects))


def test_torch_reads_what_torch_wrote(tmp_path: Path) -> None:
    """An index that is read, written again and read by torch is equal in every field."""
    index = read_metadata(write(tmp_path / "a", tensors(), 3))
    kept = FileSystemReader(tmp_path / "a").read_metadata()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / ".metadata").write_bytes(index_bytes(index.tensors, index.objects))
    found = FileSystemReader(tmp_path / "b").read_metadata()
    assert found.state_dict_metadata == kept.state_dict_metadata
    assert found.storage_data == kept.storage_data
    assert [type(key.offset) for key in found.storage_data] == [type(key.offset) for key in kept.storage_data]
    assert found.planner_data == {key: (key,) for key in kept.state_dict_metadata}
    assert found.version == "1.0.0"


def test_torch_loads_through_it(tmp_path: Path) -> None:
    """torch loads the tensors into another sharding."""
    made = tensors()
    index = read_metadata(write(tmp_path / "a", made, 3))
    (tmp_path / "a" / ".metadata").write_bytes(index_bytes(index.tensors, index.objects))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    assert all(loaded[name].equal(tensor) for name, tensor in made.items() if tensor.dtype.itemsize > 1)
    bits = {name: t.view(torch.uint8) for name, t in made.items() if t.dtype.itemsize == 1}
    assert all(loaded[name].view(torch.uint8).equal(tensor) for name, tensor in bits.items())


@pytest.mark.parametrize("dtype", ITEM_SIZE)
def test_every_type(dtype: str, tmp_path: Path) -> None:
    chunk = TensorChunk("__0_0.distcp", 0, 640, (0,), (5,))
    roundtrip(tmp_path, {"w": DistTensor(dtype, (5,), (chunk,))}, {})
    found: Metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    properties = found.state_dict_metadata["w"].properties
    assert (properties.dtype, properties.layout) == (getattr(torch, dtype), torch.strided)
    assert properties.memory_format is torch.contiguous_format
    assert not properties.requires_grad and not properties.pin_memory


_NUMBER = st.one_of(st.integers(0, 300), st.integers(0, 1 << 62))


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=300),
        st.tuples(
            st.sampled_from(sorted(ITEM_SIZE)),
            st.lists(_NUMBER, max_size=4),
            st.lists(st.tuples(_NUMBER, _NUMBER, _NUMBER), max_size=5),
        ),
        max_size=8,
    ),
    st.dictionaries(st.text(min_size=1, max_size=5), st.tuples(_NUMBER, _NUMBER), max_size=4),
)
def test_any_index(tmp_path_factory: pytest.TempPathFactory, made: dict, objects: dict) -> None:
    stored = {}
    for name, (dtype, shape, places) in made.items():
        chunks = {first: TensorChunk("f", at, n, (first,), (n,)) for first, at, n in places}
        if chunks:
            stored[name] = DistTensor(dtype, tuple(shape), tuple(chunks.values()))
    others = {k: StoredObject("g", *v) for k, v in objects.items() if k not in stored}
    roundtrip(tmp_path_factory.mktemp("any"), stored, others)


def ultra(layers: int) -> tuple[dict[str, DistTensor], dict[str, StoredObject]]:
    """Some layers of Ultra's experts, one chunk per expert; Ultra has 49 such layers."""
    stored, at = {}, 0
    for layer in range(layers):
        for fc in (1, 2):
            chunks = []
            for expert in range(512):
                chunks.append(
                    TensorChunk(f"__0_{at % 61}.distcp", at, 20_971_520, (expert, 0, 0), (1, 5120, 2048))
                )
                at += 20_971_520
            name = f"decoder.layers.{layer}.mlp.experts.experts.linear_fc{fc}.weight"
            stored[name] = DistTensor("bfloat16", (512, 5120, 2048), tuple(chunks))
    objects = {
        f"decoder.layers.{i}.x._extra_state/shard_{i}_512": StoredObject("f", i, 704) for i in range(2000)
    }
    return stored, objects


def test_bytes_and_memory_for_each_chunk(tmp_path: Path) -> None:
    stored, objects = ultra(8)
    tracemalloc.start()
    data = index_bytes(stored, objects)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    chunks = sum(len(tensor.chunks) for tensor in stored.values()) + len(objects)
    # All of Ultra, about 100,000 chunks and objects, is 15 MB.
    assert len(data) < 160 * chunks and peak < 2000 * chunks, (len(data) / chunks, peak / chunks)
    roundtrip(tmp_path, stored, objects)


def test_equal_input_gives_equal_bytes() -> None:
    (one, others), (two, more) = ultra(2), ultra(2)
    assert index_bytes(one, others) == index_bytes(two, more)


def test_refused() -> None:
    chunk = TensorChunk("f", 0, 64, (0,), (1,))
    twice = DistTensor("float32", (1,), (chunk, chunk))
    with pytest.raises(ValueError, match="'w' has two parts at"):
        index_bytes({"w": twice}, {})


def test_megatron_reads_the_rest(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing.core import maybe_load_config
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    (tmp_path / "metadata.json").write_text(CONFIG_TEXT)
    config = maybe_load_config(str(tmp_path))
    assert config is not None
    assert json.loads(CONFIG_TEXT) == vars(config)
    assert ShardedObject("common_state", None, (1,), (0,)).unique_key == COMMON_OBJECT
