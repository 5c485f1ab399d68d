"""Legacy mp_rank folders written by stock Megatron in many layouts, compared with torch_dist."""

from __future__ import annotations

import argparse
import random
import shutil
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_nemotron3.checkpoints.convert import inventory, plan
from megatron_nemotron3.checkpoints.convert.megatron_args import config_of
from megatron_nemotron3.checkpoints.convert.mp_rank import common_state, open_mp_rank
from megatron_nemotron3.checkpoints.convert.plan import whole
from megatron_nemotron3.checkpoints.convert.sources import FileSource
from megatron_nemotron3.checkpoints.metadata import CheckpointError, read_metadata
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.golden.checkpoints.values import part, values
from tests.support import checkpoint_runs as runs
from tests.support.checkpoint_reading import read_rows
from tests.support.convert_models import DISTINCT

#: Rows of the embedding of all models here; DISTINCT has 509 words.
PADDED = 512
#: Decoder layers of DISTINCT with pipeline stages; sizes given to `initialize`; ranks.
LAYOUTS: dict[str, tuple[str, dict[str, int], int]] = {
    "one rank": ("M-E*", {}, 1),
    "tp2 etp2": ("M-E*", {"tp": 2, "etp": 2}, 2),
    "tp2 ep2": ("M-E*", {"tp": 2, "ep": 2}, 2),
    "ep2": ("M-E*", {"ep": 2}, 2),
    "pp2 uneven": ("M|-E*", {"pp": 2}, 2),
    "pp2 vpp2": ("M|-|E|*", {"pp": 2, "vpp": 2}, 2),
}
LARGE = {
    "tp2 pp2 ep2": ("M-E|*", {"tp": 2, "pp": 2, "ep": 2}, 4),
    "tp2 pp2 vpp2 etp2": ("M|-E|*|", {"tp": 2, "pp": 2, "vpp": 2, "etp": 2}, 4),
    "tp4": ("M-E*", {"tp": 4, "ep": 2, "etp": 2}, 4),
}


def write(config: Nemotron3Config, pattern: str, sizes: dict[str, int], folder: str) -> None:
    """Save as save_checkpoint does for --ckpt-format torch, with values that are derived from the keys."""
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.training import checkpointing

    from megatron_nemotron3.proof.certify.tensors import sharded
    from megatron_nemotron3.specs import stack_spec
    from tests.support.model_mapping import transformer_config

    initialize(**sizes)
    tp, pp, ep = (sizes.get(name, 1) for name in ("tp", "pp", "ep"))
    arguments = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": sizes.get("etp", 1),
    }
    settings = transformer_config(
        config,
        **arguments,
        sequence_parallel=tp > 1,
        virtual_pipeline_model_parallel_size=sizes.get("vpp"),
        pipeline_dtype=torch.float32,
    )
    stages = range(sizes["vpp"]) if "vpp" in sizes else [None]
    models = [
        HybridModel(
            config=settings,
            hybrid_stack_spec=stack_spec("torch", config),
            vocab_size=PADDED,
            max_sequence_length=64,
            hybrid_layer_pattern="/".join([pattern, *config.full_pattern.split("/")[1:]]),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        )
        for stage in stages
    ]
    with torch.no_grad():
        for t in sharded(models):
            local = (1,) * t.prepend_axis_num + tuple(t.data.shape)
            mine = part(t.key, tuple(t.global_shape), tuple(t.global_offset), local)
            t.data.copy_(torch.from_numpy(mine).reshape(t.data.shape))
    if parallel_state.get_data_parallel_rank() and parallel_state.get_expert_data_parallel_rank():
        return
    args = argparse.Namespace(ckpt_format="torch", no_save_optim=True, no_save_rng=True, **arguments)
    state = checkpointing.generate_state_dict(args, models, None, None, None, iteration=3)
    path = checkpointing.get_checkpoint_name(folder, 3)
    Path(path).parent.mkdir(parents=True)
    torch.save(state, path)


def expected(config: Nemotron3Config) -> dict[str, Any]:
    """Return the Hugging Face tensors of the values that `write` stores."""
    result: dict[str, Any] = {}
    for mapping in inventory.mappings(config, padded_vocab_size=PADDED):
        result |= plan.apply(mapping.to_hf(), {t.name: values(t.name, t.shape) for t in mapping.megatron})
    return result


def hf(config: Nemotron3Config, source: FileSource) -> dict[str, Any]:
    """Return the Hugging Face tensors of a source in FP32."""
    result: dict[str, Any] = {}
    for mapping in inventory.mappings_of(config, source.tensors, padded_vocab_size=PADDED):
        tensors = {}
        for t in mapping.megatron:
            assert source.tensors[t.name].shape == t.shape
            assert source.tensors[t.name].dtype == "float32"
            tensors[t.name] = source.read(t.name, whole(t.shape)).view(numpy.float32)
        result |= plan.apply(mapping.to_hf(), tensors)
    return result


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys() and left
    for name in left:
        assert numpy.array_equal(left[name], right[name]), name


def check(tmp_path: Path, pattern: str, sizes: dict[str, int], ranks: int) -> None:
    run_distributed(write, ranks, DISTINCT, pattern, sizes, str(tmp_path))
    folder = tmp_path / "iter_0000003"
    source, state = open_mp_rank(folder, DISTINCT, check_replicas=True), common_state(folder)
    assert (state["iteration"], state["checkpoint_version"]) == (3, 3.0)
    assert state["args"].field("tensor_model_parallel_size") == sizes.get("tp", 1)
    same(hf(DISTINCT, source), expected(DISTINCT))
    source.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, tmp_path: Path) -> None:
    check(tmp_path, *LAYOUTS[layout])


@pytest.mark.full
@pytest.mark.parametrize("layout", LARGE)
def test_large_layouts(layout: str, tmp_path: Path) -> None:
    check(tmp_path, *LARGE[layout])


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [ParallelLayout(), ParallelLayout(tp=2, ep=2), ParallelLayout(pp=2), ParallelLayout(dp=2)],
    ids=["tp1", "tp2 ep2", "pp2", "dp2"],
)
def test_training_runs(layout: ParallelLayout, tmp_path: Path) -> None:
    """A run saves torch_dist; resumed, it saves the same weights as mp_rank files."""
    dist, legacy = str(tmp_path / "dist"), str(tmp_path / "legacy")
    runs.train(layout, "--exit-interval", "2", save=dist)
    convert = ("--ckpt-convert-format", "torch", "--ckpt-convert-save", legacy)
    runs.train(layout, *convert, load=dist, save=dist)
    index = read_metadata(tmp_path / "dist" / "iter_0000002")
    folder = tmp_path / "legacy" / "torch" / "iter_0000002"
    state, config = common_state(folder), runs.CONFIG
    source = open_mp_rank(folder, config, check_replicas=True)
    assert state["iteration"] == 2
    assert config_of(state["args"], vocab_size=config.vocab_size).pattern == config.pattern
    rows = index.tensors["embedding.word_embeddings.weight"].shape[0]
    stored: dict[str, Any] = {}
    for mapping in inventory.mappings(config, padded_vocab_size=rows):
        whole_ = {t.name: read_rows(index, t.name).numpy() for t in mapping.megatron}
        stored |= plan.apply(mapping.to_hf(), whole_)
    mine: dict[str, Any] = {}
    for mapping in inventory.mappings_of(config, source.tensors, padded_vocab_size=rows):
        read = {t.name: source.read(t.name, whole(t.shape)).view(numpy.float32) for t in mapping.megatron}
        mine |= plan.apply(mapping.to_hf(), read)
    same(mine, stored)


# -- one small file, and what can be wrong with it ---------------------------------------------------

PLAIN = get("super-tiny").but(
    name="plain",
    pattern="M*E",
    vocab_size=64,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_latent_size=None,
    mtp_pattern=None,
    mtp_num_layers=0,
)


def state_of(config: Nemotron3Config = PLAIN) -> dict[str, Any]:
    """Write a legacy checkpoint of one rank."""
    model = OrderedDict(
        (t.name, torch.from_numpy(values(t.name, t.shape)).to(getattr(torch, t.dtype)))
        for t in inventory.megatron_tensors(config, dialect="parameter")
    )
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]  # as a module's state
    model["decoder.layers.0.mixer.in_proj._extra_state"] = torch.zeros(0, dtype=torch.uint8)
    args = argparse.Namespace(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1
    )
    return {"args": args, "iteration": 7, "checkpoint_version": 3.0, "model": model}


def save(folder: Path, state: Any, name: str = "mp_rank_00") -> Path:
    (folder / name).mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / name / "model_optim_rng.pt")
    return folder


def test_views_and_wrappers(tmp_path: Path) -> None:
    """Transposed tensors, slices of a larger storage, and DDP's prefix are read."""
    state = state_of()
    straight = open_mp_rank(save(tmp_path / "a", state), PLAIN)
    model = state["model"]
    name, other = "mixer.out_proj.weight", "decoder.layers.0.mixer.A_log"
    key = f"decoder.layers.0.{name}"
    model[key] = model[key].t().contiguous().t()
    model[other] = torch.cat([torch.ones(5).bfloat16(), model[other]])[5:]
    state["model"] = {f"module.{k}": v for k, v in model.items()}
    odd = open_mp_rank(save(tmp_path / "b", state), PLAIN)
    assert odd.tensors.keys() == straight.tensors.keys()
    for tensor, at in straight.tensors.items():
        slices = whole(at.shape)
        assert numpy.array_equal(odd.read(tensor, slices), straight.read(tensor, slices)), tensor


def test_experts_side_by_side(tmp_path: Path) -> None:
    """GroupedMLP of 0.16 views `weight1` as [experts, hidden, ffn], `weight2` as [experts, ffn, hidden]."""
    state = state_of()
    one_by_one = open_mp_rank(save(tmp_path / "a", state), PLAIN)
    model, prefix = state["model"], "decoder.layers.2.mlp.experts."
    for number, rows in (("1", PLAIN.hidden_size), ("2", -1)):
        experts = [model.pop(f"{prefix}linear_fc{number}.weight{e}") for e in range(4)]
        stacked = torch.stack([expert.t() for expert in experts])
        columns = -1 if rows > 0 else PLAIN.hidden_size
        model[f"{prefix}weight{number}"] = stacked.reshape(rows, columns)
    together = open_mp_rank(save(tmp_path / "b", state), PLAIN)
    assert together.tensors.keys() == one_by_one.tensors.keys()
    for name, tensor in one_by_one.tensors.items():
        slices = whole(tensor.shape)
        assert numpy.array_equal(together.read(name, slices), one_by_one.read(name, slices)), name


def test_opening_reads_no_weights(tmp_path: Path) -> None:
    config = PLAIN.but(vocab_size=1 << 15)  # 2 x 8 MB
    folder = save(tmp_path, state_of(config))
    open_mp_rank(folder, config)  # imports
    tracemalloc.start()
    source = open_mp_rank(folder, config)
    source.read("output_layer.weight", ((5, 9), (0, config.hidden_size)))
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_replicas_that_differ(tmp_path: Path) -> None:
    layout = ("M-E*", {"tp": 2, "ep": 2}, 2)
    run_distributed(write, layout[2], DISTINCT, *layout[:2], str(tmp_path))
    folder = tmp_path / "iter_0000003"
    path = folder / "mp_rank_01_001" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["model"]["decoder.layers.2.mlp.router.weight"][3, 7] += 1
    torch.save(state, path)
    open_mp_rank(folder, DISTINCT)
    with pytest.raises(CheckpointError, match=r"mp_rank_01_001/.*layers.2.mlp.router.weight differs from"):
        open_mp_rank(folder, DISTINCT, check_replicas=True)
    shutil.rmtree(folder / "mp_rank_01_001")
    with pytest.raises(CheckpointError, match="written with TP=2, but its folders have TP=1: copy"):
        open_mp_rank(folder, DISTINCT)


class Hostile:
    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch /tmp/pwned",)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": {"language_model": {}}}, "language_model is a dict, .*older than megatron-core"),
        ({"model": [1]}, "its model is a list"),
        ({"model": {3: torch.zeros(2)}}, "the name of a weight is the int 3"),
        ({"model": {"decoder.layers.1.pre_mlp_layernorm.weight": torch.zeros(2)}}, "layer 0 is missing"),
        ({"model": {"output_layer.weight": Hostile()}}, r"names (posix|os).system, which no checkpoint"),
        ({"model": {"output_layer.weight": torch.zeros(2).to_sparse()}}, "output_layer.weight is a"),
    ],
)
def test_wrong_contents(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    folder = save(tmp_path, state_of() | change)
    with pytest.raises(CheckpointError, match=f"{folder}.*{text}"):
        open_mp_rank(folder, PLAIN)


def test_wrong_models(tmp_path: Path) -> None:
    folder = save(tmp_path, state_of())
    for config, text in (
        (PLAIN.but(pattern="M*EM"), "hold 3 layers, plain has 4: is it another model"),
        (PLAIN.but(pattern="*ME"), "0 rows of the name table fit"),
        (PLAIN.but(hidden_size=64), r"has shape \[64, 128\], plain has \[64, 64\] at TP=1"),
        (PLAIN.but(num_moe_experts=2), "expert 2"),
    ):
        with pytest.raises(CheckpointError, match=text):
            open_mp_rank(folder, config)
    state = state_of()
    state["model"]["decoder.layers.0.nonsense"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match="nonsense': 0 rows of the name table fit"):
        open_mp_rank(save(tmp_path, state), PLAIN)
    source = open_mp_rank(folder, PLAIN, allow_unused=["*.layers.0.nons*"])
    assert len(source.tensors) == len(state["model"]) - 2  # and the extra state


def test_wrong_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no mp_rank_… folders"):
        open_mp_rank(tmp_path, PLAIN)
    state = state_of()
    save(tmp_path / "a", state, "mp_rank_00")
    save(tmp_path / "a", state, "mp_rank_00_000")
    with pytest.raises(CheckpointError, match="mp_rank_00 and mp_rank_00_000 belong to different layouts"):
        open_mp_rank(tmp_path / "a", PLAIN)
    save(tmp_path / "b", state, "mp_rank_00_001")
    with pytest.raises(CheckpointError, match="PP=1 and EP=1, so the last number"):
        open_mp_rank(tmp_path / "b", PLAIN)
    state["args"].expert_model_parallel_size = 2
    save(tmp_path / "b", state, "mp_rank_00_001")
    with pytest.raises(CheckpointError, match="folder of EP rank 0, PP rank 0 is missing"):
        open_mp_rank(tmp_path / "b", PLAIN)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "mp_rank_00").symlink_to(tmp_path / "a" / "mp_rank_00")
    with pytest.raises(CheckpointError, match="it is a link"):
        open_mp_rank(tmp_path / "c", PLAIN)
    (tmp_path / "d" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="d/mp_rank_00/model_optim_rng.pt: No such file"):
        open_mp_rank(tmp_path / "d", PLAIN)
    state["args"] = argparse.Namespace(expert_tensor_parallel_size=2)
    with pytest.raises(CheckpointError, match="ETP=2 and TP=1.*overwrote each other.*torch_dist"):
        open_mp_rank(save(tmp_path / "e", state), PLAIN)


def test_damaged_files(tmp_path: Path) -> None:
    """A truncated or changed file gives a clear error, unless the change was in an element."""
    folder = save(tmp_path, state_of())
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    data, pick, refused = path.read_bytes(), random.Random(1), 0
    with path.open("wb") as file:
        torch.save(state_of(), file, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=f"{path}: it does not end like a torch.save archive"):
        open_mp_rank(folder, PLAIN)
    head = data.index(b"data.pkl")
    for number in range(120):
        broken = bytearray(data)
        if number % 4:
            # In the pickle, or in the directory at the end.
            at = (
                pick.randrange(head, head + 9000)
                if number % 4 < 3
                else pick.randrange(len(data) - 6000, len(data))
            )
            broken[at] = pick.randrange(256)
        else:
            del broken[pick.randrange(len(data)) :]
        path.write_bytes(broken)
        try:
            source = open_mp_rank(folder, PLAIN)
            for name, tensor in source.tensors.items():
                source.read(name, whole(tensor.shape))
            source.close()
        except CheckpointError as problem:
            assert str(problem).startswith(str(folder))
            refused += 1
    assert refused > 60
