"""Whole conversions of small models in both directions, with the command line."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
from megatron_nemotron3.models import Nemotron3Config, get, names, tiny
from tests.support import convert_models as models
from tests.support.checkpoint_writer import same_bytes, write
from tests.support.counted_job import digest
from tests.support.hf_folders import hf_values, read_hf, write_hf
from tests.support.megatron_tensors import megatron_tensors

CONFIGS = {name: tiny(get(name)) for name in names()} | {"distinct": models.DISTINCT}
CONFIGS |= {f"random{seed}": models.random_config(seed) for seed in range(6)}
QUICK = ("super", "nemotron-h-8b", "distinct", "random0", "random1")


def nemotron3(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in CONFIGS]
)
def test_there_and_back(tmp_path: Path, name: str) -> None:
    """A round trip keeps all bits and types, with a padded vocabulary in between."""
    config = CONFIGS[name]
    values = write_hf(tmp_path / "hf", config, files=2)
    pad = ("--make-vocab-size-divisible-by", 300)
    assert nemotron3("convert", "from-hf", tmp_path / "hf", tmp_path / "megatron", "--workers", 1, *pad) == 0
    assert nemotron3("convert", "verify", tmp_path / "hf", tmp_path / "megatron", "--workers", 1) == 0
    back = ("convert", "to-hf", tmp_path / "megatron", tmp_path / "back", "--shard-size", "40kB")
    assert nemotron3(*back, "--workers", 2) == 0
    found = read_hf(tmp_path / "back")
    assert found.keys() == values.keys()
    assert all(same_bytes(found[name], values[name]) for name in values)
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    opened = open_checkpoint(tmp_path / "megatron")
    assert opened.padded_vocab_size == -(-config.vocab_size // 300) * 300
    written = config_json.read(json.loads((tmp_path / "back/config.json").read_text()))
    assert (written.pattern, written.mtp_pattern) == (config.pattern, config.mtp_pattern)


def test_the_stored_tensors_are_what_the_rules_say(tmp_path: Path) -> None:
    """Megatron's tensors, read by torch, equal the rules applied in memory."""
    from torch.distributed.checkpoint import FileSystemReader, load

    from tests.support import transform_arrays

    config = models.DISTINCT
    values = write_hf(tmp_path / "hf", config)
    pad = ("--make-vocab-size-divisible-by", 512)
    assert nemotron3("convert", "from-hf", tmp_path / "hf", tmp_path / "out", "--workers", 1, *pad) == 0
    reader = FileSystemReader(tmp_path / "out/release")
    stored = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    load(stored, storage_reader=reader, no_dist=True)
    assert set(stored) == {t.name for t in megatron_tensors(config)}
    layer = {kind: f"layers.{config.pattern.index(kind)}." for kind in config.pattern}
    m, e, a, d = (("backbone." + layer[k], "decoder." + layer[k]) for k in "ME*-")
    c = config
    bc = c.mamba_num_groups * c.mamba_state_dim
    rows = (c.mamba_inner_size, c.mamba_inner_size, bc, bc, c.mamba_num_heads)
    parts = transform_arrays.split_rows(values[m[0] + "mixer.in_proj.weight"], rows)
    for part, expected in zip(("z", "x", "B", "C", "dt"), parts):
        assert stored[f"{m[1]}mixer.in_proj.weight.{part}"].equal(expected)
    qkv = [values[f"{a[0]}mixer.{x}_proj.weight"] for x in "qkv"]
    assert stored[a[1] + "self_attention.linear_qkv.weight"].equal(
        transform_arrays.merge_qkv(*qkv, c.num_query_groups)
    )
    experts = [values[f"{e[0]}mixer.experts.{i}.down_proj.weight"] for i in range(c.num_moe_experts or 0)]
    assert stored[e[1] + "mlp.experts.experts.linear_fc2.weight"].equal(torch.stack(experts))
    bias = stored[e[1] + "mlp.router.expert_bias"]
    assert bias.dtype == torch.float32 and bias.equal(values[e[0] + "mixer.gate.e_score_correction_bias"])
    table = stored["embedding.word_embeddings.weight"]
    assert (
        table[:509].equal(values["backbone.embeddings.weight"])
        and not table[509:].any()
        and len(table) == 512
    )
    assert stored[d[1] + "mlp.linear_fc1.weight"].equal(values[d[0] + "mixer.up_proj.weight"])
    inner = len(c.mtp_pattern or "")
    last = f"mtp.layers.{2 * inner - 1}.final_layernorm.weight"
    assert stored["mtp.layers.1.final_layernorm.weight"].equal(values[last])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Nemotron3Config, dict[str, torch.Tensor]]:
    """An HF folder of a tiny Super, and the Megatron folder converted from it."""
    folder = tmp_path_factory.mktemp("small")
    config = tiny(get("super"))
    values = write_hf(folder / "hf", config)
    assert nemotron3("convert", "from-hf", folder / "hf", folder / "megatron", "--workers", 1) == 0
    return folder, config, values


Small = tuple[Path, Nemotron3Config, dict[str, torch.Tensor]]


def test_files_do_not_depend_on_the_number_of_workers(small: Small, tmp_path: Path) -> None:
    for workers in (1, 3):
        out = tmp_path / str(workers) / "out"
        words = (small[0] / "hf", out, "--workers", workers, "--shard-size", "300kB")
        assert nemotron3("convert", "from-hf", *words) == 0
    one, three = digest(tmp_path / "1/out"), digest(tmp_path / "3/out")
    assert one == three and len(one) > 8


def test_a_cast_rounds_all_but_the_expert_bias(small: Small, tmp_path: Path) -> None:
    folder, _, values = small
    assert nemotron3("convert", "to-hf", folder / "megatron", tmp_path / "f32", "--dtype", "float32") == 0
    for name, tensor in read_hf(tmp_path / "f32").items():
        assert tensor.dtype == torch.float32 and tensor.equal(values[name].float())
    assert json.loads((tmp_path / "f32/config.json").read_text())["dtype"] == "float32"
    assert nemotron3("convert", "verify", tmp_path / "f32", folder / "megatron") == 1  # types differ
    noise = {n: v.float() + 1e-3 * torch.randn(v.shape) for n, v in values.items()}
    write_hf(tmp_path / "noise", small[1], values=noise, dtype="float32")
    assert nemotron3("convert", "from-hf", tmp_path / "noise", tmp_path / "bf16", "--dtype", "bfloat16") == 0
    assert nemotron3("convert", "to-hf", tmp_path / "bf16", tmp_path / "back") == 0
    for name, tensor in read_hf(tmp_path / "back").items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.equal(noise[name] if kept else noise[name].to(torch.bfloat16)), name


def test_a_reference_gives_its_files_and_config(small: Small, tmp_path: Path) -> None:
    folder, config, _ = small
    reference = tmp_path / "reference"
    reference.mkdir()
    base = config_json.write(config) | {"eos_token_id": 11, "auto_map": {"AutoConfig": "configuration.C"}}
    (reference / "config.json").write_text(json.dumps(base))
    copied = {"tokenizer.json": b"{}\n ", "generation_config.json": b"{ }", "modeling.py": b"# code\n"}
    for name, data in copied.items():
        (reference / name).write_bytes(data)
    (reference / "model.safetensors").write_bytes(b"not copied")
    words = ("convert", "to-hf", folder / "megatron", tmp_path / "out", "--reference", reference)
    assert nemotron3(*words) == 0
    found = digest(tmp_path / "out")
    assert {name: found[name] for name in copied} == copied
    written = json.loads(found["config.json"])
    assert written["eos_token_id"] == 11 and written["auto_map"] == base["auto_map"]
    (reference / "config.json").write_text(json.dumps(config_json.write(tiny(get("nano")))))
    assert nemotron3(*words[:3], tmp_path / "other", *words[4:]) == 2


def test_a_dry_run_writes_nothing(small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small[0]
    for way, source in (("to-hf", "megatron"), ("from-hf", "hf")):
        assert nemotron3("convert", way, folder / source, tmp_path / "out", "--dry-run") == 0
    out = capsys.readouterr().out
    assert out.count("nothing was written") == 2 and "2 files, 6.1 MB" in out and "are free" in out
    assert not list(tmp_path.iterdir())


def test_verify_finds_one_bit(small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config, values = small
    changed = dict(values)
    name = "backbone.layers.3.mixer.k_proj.weight"
    changed[name] = values[name].clone()
    changed[name].view(torch.int16)[5, 7] ^= 1
    write_hf(tmp_path / "changed", config, values=changed)
    assert nemotron3("convert", "verify", folder / "megatron", tmp_path / "changed") == 1
    out = capsys.readouterr().out
    assert f"differs      {name}: 1 of 8,192 elements, first at [5, 7]" in out
    assert "492 tensors" in out and "1 differ" in out
    assert nemotron3("convert", "verify", folder / "megatron", tmp_path / "changed", "--json") == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["equal"], facts["tensors_equal"], facts["tensors_different"]) == (False, 492, 1)
    assert [one["tensor"] for one in facts["differences"]] == [name]
    assert facts["a"]["kind"] == "torch_dist" and facts["b"]["kind"] == "hugging face"


def test_verify_says_how_far(small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config, values = small
    near, far, type_ = (f"backbone.layers.3.mixer.{one}_proj.weight" for one in "kvq")
    changed = {name: values[name].clone() for name in (near, far, type_)}
    values, changed[type_] = values | {far: torch.zeros_like(values[far])}, changed[type_].float()
    changed[near][5, 7] += 0.25
    changed[far] = values[far].clone()
    changed[far][1, 2] = -0.5
    write_hf(tmp_path / "one", config, values=values)
    write_hf(tmp_path / "other", config, values=values | changed)
    assert nemotron3("convert", "verify", tmp_path / "one", tmp_path / "other", "--json") == 1
    facts = json.loads(capsys.readouterr().out)
    found = {one["tensor"]: one for one in facts["differences"]}
    assert set(found) == set(changed) and facts["farthest"] == found[far]
    assert (found[far]["largest"], found[far]["relative"]) == (0.5, 1.0)
    apart = (changed[near].double() - values[near].double()).abs().max().item()
    assert found[near]["largest"] == apart
    assert found[near]["relative"] == apart / changed[near].double().abs().max().item()
    assert found[type_]["what"].startswith("type bfloat16 and float32, up to 0 apart")
    # A packed side and the one that it was packed from.
    words = ("to-hf", folder / "megatron", tmp_path / "packed", "--quantize", "super-nvfp4")
    assert nemotron3("convert", *words) == 0
    capsys.readouterr()
    assert nemotron3("convert", "verify", folder / "hf", tmp_path / "packed", "--dequantize", "--json") == 1
    facts = json.loads(capsys.readouterr().out)
    # The codes of E2M1 are at most 2 of 6 apart, and scales are rounded.
    assert 0.1 < facts["farthest"]["relative"] < 0.2 and "experts" in facts["farthest"]["tensor"]


def test_verify_with_the_manifest(small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(small[0] / "megatron", copy)
    assert nemotron3("convert", "verify", copy) == 0
    path = copy / "release/__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert nemotron3("convert", "verify", copy) == 1
    capsys.readouterr()
    assert nemotron3("check", small[0] / "hf", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["kind"] == "hugging face" and facts["sound"] and facts["tensors"] == 493
    assert nemotron3("convert", "verify", copy, "--json") == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["equal"] is False and facts["files"] - facts["files_equal"] == 1
    assert len(facts["problems"]) == 1
    assert nemotron3("convert", "verify", copy) == 1
    path.unlink()
    assert nemotron3("convert", "verify", copy) == 1
    out = capsys.readouterr().out
    assert f"{path}: CRC32" in out and f"{path}: No such file" in out
    assert nemotron3("convert", "verify", small[0] / "hf") == 2


@pytest.mark.parametrize("prefix", ["model.", "base_model.model.", "_orig_mod."])
def test_a_prefix_of_all_names_is_taken_off(
    prefix: str, small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {prefix + name: value for name, value in hf_values(small[1]).items()}
    write_hf(tmp_path / "hf", small[1], values=values)
    assert nemotron3("convert", "from-hf", tmp_path / "hf", tmp_path / "out") == 0
    assert nemotron3("convert", "verify", small[0] / "hf", tmp_path / "out") == 0
    values["lm_head.weight"] = values.pop(prefix + "lm_head.weight")  # not of all: not a wrapper
    write_hf(tmp_path / "some", small[1], values=values)
    assert nemotron3("convert", "from-hf", tmp_path / "some", tmp_path / "other") == 2
    assert f"do not belong to the model, first '{prefix}backbone" in capsys.readouterr().err


def test_what_config_json_lacks_is_said(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    values = hf_values(small[1])
    write_hf(folder, small[1], values=values)
    data = json.loads((folder / "config.json").read_text())
    without = {key: value for key, value in data.items() if "mtp" not in key and "nextn" not in key}
    without.pop("megatron_nemotron3", None)
    words = ("convert", "from-hf", folder, tmp_path / "out")
    (folder / "config.json").write_text(json.dumps(without))
    assert nemotron3(*words) == 2
    error = capsys.readouterr().err
    assert "set num_nextn_predict_layers" in error and "or leave MTP out by --mtp-num-layers 0\n" in error
    assert nemotron3(*words, "--mtp-num-layers", "0", "--dry-run") == 0
    cure = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    (folder / "config.json").write_text(json.dumps(without | cure))
    assert nemotron3(*words, "--dry-run") == 0
    shutil.rmtree(folder)
    values["backbone.layers.0.mixer.in_proj.weight_scale"] = torch.ones(1)
    write_hf(folder, small[1], values=values)
    capsys.readouterr()
    assert nemotron3(*words) == 2 and "and give --dequantize\n" in capsys.readouterr().err
    assert nemotron3(*words, "--dequantize") == 2
    assert "copy one from where they were quantized, or drop --dequantize\n" in capsys.readouterr().err


def test_values_of_one_expert_are_named(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron keeps all experts of a layer in one tensor. A cast that overflows names what overflows."""
    name = "backbone.layers.1.mixer.experts.7.up_proj.weight"
    values = hf_values(small[1])
    values[name][3, 4] = 1e30
    write_hf(tmp_path / "hf", small[1], values=values)
    words = ("convert", "from-hf", tmp_path / "hf", tmp_path / "out")
    assert nemotron3(*words, "--dtype", "float16") == 2
    error = capsys.readouterr().err
    assert "hf: decoder.layers.1.mlp.experts.experts.linear_fc1.weight has values that are NaN" in error
    values[name][3, 4] = float("inf")
    shutil.rmtree(tmp_path / "hf")
    write_hf(tmp_path / "hf", small[1], values=values)
    assert nemotron3(*words, "--dtype", "float16") == 2
    assert f"/hf/model.safetensors: {name} has values that are NaN" in capsys.readouterr().err


def test_a_forgotten_tiny_is_named(small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("convert", "from-hf", small[0] / "hf", tmp_path / "out", "--model")
    name = small[1].name.removesuffix("-tiny")
    assert nemotron3(*words, name) == 2
    error = capsys.readouterr().err
    assert f"it is the size of its smaller variant: add --tiny to --model {name}\n" in error
    assert nemotron3(*words, name, "--tiny", "--dry-run") == 0


def test_a_byte_that_differs_from_the_manifest_is_not_converted(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, back = tmp_path / "hf", tmp_path / "back"
    assert nemotron3("convert", "to-hf", small[0] / "megatron", hf) == 0
    assert nemotron3("convert", "from-hf", hf, tmp_path / "whole") == 0
    assert "manifest     1 file as nemotron3_manifest.json says" in capsys.readouterr().out
    with open(hf / "model.safetensors", "r+b") as file:
        file.seek(-7, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-7, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert nemotron3("convert", "from-hf", hf, back) == 2
    error = capsys.readouterr().err
    assert f"{hf}/model.safetensors: CRC32" in error and error.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["hf", "whole"]
    (hf / "nemotron3_manifest.json").unlink()  # the cure where the change is the user's
    assert nemotron3("convert", "from-hf", hf, back) == 0


def test_tensors_left_over(small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config, values = small
    more = values | {"vision.a": torch.zeros(2), "vision.b": torch.zeros(2)}
    write_hf(tmp_path / "more", config, values=more)
    words = ("convert", "from-hf", tmp_path / "more", tmp_path / "out")
    assert nemotron3(*words) == 2
    assert "2 tensors do not belong to the model, first 'vision.a'" in capsys.readouterr().err
    assert nemotron3(*words, "--allow-unused", "vision.*") == 0
    out = capsys.readouterr().out
    assert "2 unused tensors" in out and "unmatched" not in out
    assert nemotron3(*words[:2], folder / "hf", tmp_path / "all", "--allow-unused", "visoin.*") == 0
    assert "unmatched    --allow-unused 'visoin.*': no tensor is called so\n" in capsys.readouterr().out
    back = ("convert", "to-hf", folder / "megatron", tmp_path / "back", "--allow-unused", "*.bias_")
    assert nemotron3(*back, "--json") == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert "unmatched --allow-unused '*.bias_': no tensor is called so" in notes
    both = ("convert", "verify", tmp_path / "more", tmp_path / "out", "--allow-unused")
    assert nemotron3(*both, "vision.*") == 0 and "unmatched" not in capsys.readouterr().out
    assert nemotron3(*both, "vision.*", "--allow-unused", "vision.c") == 0
    assert "unmatched    --allow-unused 'vision.c': no tensor is called so\n" in capsys.readouterr().out
    assert nemotron3("convert", "verify", folder / "hf", tmp_path / "out") == 0


def test_not_a_number(small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = hf_values(small[1])
    values["backbone.layers.0.norm.weight"][3] = float("nan")
    values["lm_head.weight"][5, 5] = -float("inf")
    write_hf(tmp_path / "nan", small[1], values=values)
    words = ("convert", "from-hf", tmp_path / "nan", tmp_path / "out")
    assert nemotron3(*words) == 2
    error = capsys.readouterr().err
    assert "has values that are NaN or infinite: --allow-nonfinite" in error
    assert f"{tmp_path}/nan/model.safetensors: lm_head.weight has" in error
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    assert nemotron3(*words, "--allow-nonfinite") == 0
    assert nemotron3("convert", "verify", tmp_path / "nan", tmp_path / "out") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["to-hf", "{megatron}", "{hf}"], "it exists: give a new folder"),
        (["to-hf", "{megatron}", "{out}", "--iteration", "7"], "there is no iteration 7; there are: none"),
        (["to-hf", "{megatron}", "{out}", "--model", "nano", "--tiny"], "super-tiny|nano-tiny"),
        (["to-hf", "{megatron}", "{out}", "--model", "supper"], "did you mean 'super'"),
        (["to-hf", "{megatron}", "{out}", "--shard-size", "many"], "give a size like 5GB"),
        (["to-hf", "{megatron}", "{out}", "--lora-alpha", "8"], "/release has no LoRA adapter: leave it out"),
        (["from-hf", "{hf}", "{out}", "--lora-alpha", "8"], "{hf} has no LoRA adapter: leave it out"),
        (["verify", "{hf}", "{megatron}", "--lora-alpha", "8"], "{megatron} have no LoRA adapter: leave it"),
        (["to-hf", "{megatron}", "{out}", "--workers", "0"], "--workers 0: give 1 or more"),
        (["to-hf", "{megatron}", "{out}", "--vocab-size", "9999"], "vocab_size=9999 is more than"),
        (["from-hf", "{hf}", "{out}", "--make-vocab-size-divisible-by", "0"], "use 1 or more"),
        (["from-hf", "{hf}", "{out}", "--tiny"], "--tiny requires --model"),
        (["from-hf", "{hf}", "{out}", "--check-logits", "2"], "--check-logits 2: give 3 or more"),
        (["to-hf", "{megatron}", "{out}", "--check-logits", "0"], "--check-logits 0: give 3 or more"),
    ],
)
def test_bad_input(
    small: Small, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {name: str(small[0] / name) for name in ("hf", "megatron", "none")} | {
        "out": str(tmp_path / "out")
    }
    assert nemotron3("convert", *(word.format(**places) for word in words)) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in message.format(**places).split("|")) and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_too_few_tokens_for_the_blocks_of_mtp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    write_hf(tmp_path / "hf", models.DISTINCT)
    words = ("convert", "from-hf", tmp_path / "hf", tmp_path / "out", "--check-logits", 3)
    assert models.DISTINCT.mtp_num_blocks == 2 and nemotron3(*words) == 2
    assert capsys.readouterr() == ("", "nemotron3 convert from-hf: --check-logits 3: give 4 or more\n")
    assert not (tmp_path / "out").exists()


#: Refuses to import what a conversion must not need.
_ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(name, name=name.partition(".")[0])
sys.meta_path.insert(0, Refuse())
from megatron_nemotron3 import cli
raise SystemExit(max(cli.main(words) for words in {commands!r}))
"""
_HEAVY = ("megatron", "transformers", "transformer_engine", "mamba_ssm", "triton", "safetensors")


def _alone(refused: tuple[str, ...], *commands: tuple[object, ...]) -> subprocess.CompletedProcess[str]:
    code = _ALONE.format(refused=refused, commands=[[str(word) for word in words] for words in commands])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["to-hf"], "convert verify"),
        (["to-hf", "--dtype", "bfloat16"], "convert verify"),
        (["to-hf", "--dtype", "float32"], "check"),
        (["to-hf", "--vocab-size", "250"], "convert verify"),
        (["to-hf", "--model", "super", "--tiny"], "convert verify"),
        (["to-hf", "--quantize", "super-nvfp4"], "check"),
        (["from-hf", "--dtype", "float16"], "check"),
        (["from-hf", "--mtp-num-layers", "0"], "convert verify"),
        (["from-hf", "--mtp-num-layers", "1"], "convert verify"),
        (["from-hf", "--allow-unused", "vision.*", "--allow-unused", "audio.*"], "convert verify"),
    ],
)
def test_the_printed_command_passes(
    small: Small, tmp_path: Path, words: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config, values = small
    source = folder / "megatron"
    if words[0] == "from-hf":
        more = {f"{name}.a": torch.zeros(2) for name in ("vision", "audio")}
        source = tmp_path / "a model"
        write_hf(source, config, values=values | (more if "--allow-unused" in words else {}))
    assert nemotron3("convert", words[0], source, tmp_path / "a result", *words[1:]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    name, *pasted = shlex.split(line.removeprefix("next         "))
    assert name == "nemotron3" and pasted[: len(command.split())] == command.split()
    assert nemotron3(*pasted) == 0


def test_masters_are_not_compared_with_the_weights(
    small: Small, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = open_checkpoint(small[0] / "megatron").weights
    content = {name: weights.read(name) for name in weights.tensors}
    masters = {
        f"optimizer.state.fp32_param.{name}": value.float() + 1e-4
        for name, value in content.items()
        if not name.endswith("expert_bias")
    }
    write(tmp_path / "m", content | masters, iteration=1)
    words = (tmp_path / "m", tmp_path / "hf", "--model", "super", "--tiny", "--from-optimizer-master")
    assert nemotron3("convert", "to-hf", *words) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line == f"next         nemotron3 check {tmp_path / 'hf'}"
    assert nemotron3("check", tmp_path / "hf") == 0


def test_needs_torch_alone(small: Small, tmp_path: Path) -> None:
    hf, made, back = small[0] / "hf", tmp_path / "megatron", tmp_path / "back"
    found = _alone(
        _HEAVY,
        ("convert", "from-hf", hf, made, "--workers", 2),
        ("convert", "to-hf", made, back, "--workers", 2),
        ("convert", "verify", back, made, "--workers", 2),
    )
    assert found.returncode == 0, found.stderr
    found = _alone((*_HEAVY, "torch"), ("convert", "to-hf", made, tmp_path / "none"))
    assert (found.returncode, found.stdout) == (2, "")
    assert "package torch is not installed: pip install 'megatron-nemotron3[convert]'" in found.stderr
    assert not (tmp_path / "none.partial").exists()
