"""LoRA adapters: peft's folders to Megatron and back, bit for bit, and merged as peft merges.

tests/golden/peft was written by the peft library (tests/golden/make_peft_adapter.py).
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_nemotron3.checkpoints import load_base, load_checkpoint
from megatron_nemotron3.checkpoints.convert.adapters import A, B, StoredAdapter, check_fits
from megatron_nemotron3.checkpoints.convert.views import InMemory
from megatron_nemotron3.cli import main
from megatron_nemotron3.inference.refit import Training, training_tensors
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.lora import LoRASettings, adding_lora
from megatron_nemotron3.train.build import build_model
from tests.support.checkpoint_writer import write
from tests.support.hf_folders import write_hf
from tests.support.peft_model import FOLDER, MODEL, RANK, base_values, transformers_model
from tests.support.world import world_of_one

#: One A for q, k and v, as Megatron's linear_qkv has.
_SHARED = {".k_proj.lora_A": ".q_proj.lora_A", ".v_proj.lora_A": ".q_proj.lora_A"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base") / "hf"
    write_hf(folder, MODEL, values=base_values(), dtype="float32")
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """peft's adapter with one A for q, k and v, in a type of its own."""
    folder = shutil.copytree(FOLDER, tmp_path / "shared")
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in tensors:
        for old, new in _SHARED.items():
            tensors[name] = tensors[name.replace(old, new)].clone() if old in name else tensors[name]
    save_file({n: t.bfloat16() for n, t in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def run(*words: object) -> None:
    assert main(["convert", *map(str, words), "--workers", "1"]) == 0


def message(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["convert", *map(str, words)]) == 2
    return capsys.readouterr().err


def pasted(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run the command that a conversion printed last; returns it."""
    *_, line = capsys.readouterr().out.splitlines()
    words = shlex.split(line.removeprefix("next         nemotron3 "))
    assert main(words) == 0
    return words


def assert_merged(folder: Path, merged: dict[str, Tensor]) -> None:
    """The folder's tensors are `merged` to rounding, and the base's to the bit."""
    found, before = load_file(folder / "model.safetensors"), base_values()
    assert found.keys() == before.keys()
    for name, value in found.items():
        if name in merged:
            assert not value.equal(before[name]), name
            torch.testing.assert_close(value, merged[name], rtol=1e-6, atol=1e-6, msg=name)
        else:
            assert value.equal(before[name]), name


def test_merged_as_peft_merges(base: Path, tmp_path: Path) -> None:
    """peft's own adapter, with an A for each of q, k, v, merged on the way there and back."""
    expected = load_file(FOLDER / "merged.safetensors")
    assert len(expected) == 31
    run("from-hf", base, tmp_path / "merged", "--adapter", FOLDER, "--merge-adapter")
    run("to-hf", tmp_path / "merged", tmp_path / "one")
    assert_merged(tmp_path / "one", expected)
    run("from-hf", base, tmp_path / "megatron")
    run("to-hf", tmp_path / "megatron", tmp_path / "other", "--adapter", FOLDER, "--merge-adapter")
    assert_merged(tmp_path / "other", expected)


def test_there_and_back(base: Path, shared: Path, tmp_path: Path) -> None:
    """peft -> Megatron -> peft: every tensor to the bit, and a configuration that names the same matrices."""
    run("from-hf", base, tmp_path / "megatron", "--adapter", shared)
    run("to-hf", tmp_path / "megatron", tmp_path / "peft", "--adapter-only")
    before, after = (load_file(f / "adapter_model.safetensors") for f in (shared, tmp_path / "peft"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    old, new = (json.loads((f / "adapter_config.json").read_text()) for f in (shared, tmp_path / "peft"))
    for key in ("r", "lora_alpha", "peft_type", "use_rslora", "bias"):
        assert old[key] == new[key], key
    for key in ("target_modules", "target_parameters"):
        assert sorted(old[key]) == sorted(new[key]), key
    # Merged, it is what verify calls equal: a checkpoint with adapters is the merged model.
    run("to-hf", tmp_path / "megatron", tmp_path / "hf", "--merge-adapter")
    assert (
        main(["convert", "verify", str(tmp_path / "megatron"), str(tmp_path / "hf"), "--workers", "1"]) == 0
    )


def test_the_printed_command_passes(base: Path, shared: Path, tmp_path: Path, capsys: Any) -> None:
    """`verify` merges a checkpoint's own adapter, and knows nothing of one that the conversion adds."""
    run("from-hf", base, tmp_path / "m", "--adapter", shared)
    assert pasted(capsys)[0] == "check"
    run("from-hf", base, tmp_path / "merged", "--adapter", shared, "--merge-adapter")
    assert pasted(capsys)[0] == "check"
    run("to-hf", tmp_path / "m", tmp_path / "hf", "--merge-adapter", "--lora-alpha", 3.5)
    assert pasted(capsys)[-2:] == ["--lora-alpha", "3.5"]
    run("to-hf", tmp_path / "m", tmp_path / "peft", "--adapter-only")
    assert "next " not in capsys.readouterr().out


def trained(config: Nemotron3Config, lora: LoRASettings) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Whole tensors of a Megatron model with random adapters, tokens, and its logits [s, vocabulary]."""
    from megatron_nemotron3.proof.certify.tensors import gather, pieces
    from megatron_nemotron3.train.build import build_model

    made = torch.Generator().manual_seed(11)
    with world_of_one(), adding_lora(lora):
        model = build_model(config, precision="fp32", backend="torch").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.requires_grad == (".adapter." in name), name
                if ".adapter.linear_out." in name:
                    parameter.normal_(std=0.2, generator=made)
        tokens = torch.randint(config.vocab_size, (1, 40), generator=made)
        with torch.no_grad():
            logits = model(tokens, torch.arange(40)[None], None)
        return gather([pieces([model])]), tokens, logits[0, :, : config.vocab_size]


@pytest.mark.filterwarnings("ignore")
def test_trained_adapter_in_transformers(tmp_path: Path) -> None:
    """Logits of a Megatron model with adapters equal those of its merged export in transformers."""
    pytest.importorskip("transformers")
    lora = LoRASettings(
        ("linear_qkv", "linear_fc1", "linear_fc2", "in_proj", "out_proj", "fc2_latent_proj"), 4, 16
    )
    tensors, tokens, logits = trained(MODEL, lora)
    write(tmp_path / "megatron", tensors, iteration=1)
    run(
        "to-hf",
        tmp_path / "megatron",
        tmp_path / "hf",
        *_model(tmp_path),
        "--lora-alpha",
        16,
        "--merge-adapter",
    )
    with torch.no_grad():
        found = transformers_model(tmp_path / "hf")(tokens).logits[0]
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_trained_adapter_in_peft(tmp_path: Path) -> None:
    """peft loads the adapter on transformers' base; logits, and peft's merge, equal ours."""
    peft = pytest.importorskip("peft", reason="needs the peft library (make test-bridge has it)")
    lora = LoRASettings(
        ("linear_qkv", "linear_proj", "*.layers.1.*linear_fc1", "*experts.linear_fc2", "in_proj"), 4, 16
    )
    tensors, tokens, logits = trained(MODEL, lora)
    write(tmp_path / "megatron", tensors, iteration=1)
    options = (*_model(tmp_path), "--lora-alpha", 16)
    bare = {name: value for name, value in tensors.items() if ".adapter." not in name}
    write(tmp_path / "bare", bare, iteration=1)
    run("to-hf", tmp_path / "bare", tmp_path / "base", *_model(tmp_path))
    run("to-hf", tmp_path / "megatron", tmp_path / "peft", *options, "--adapter-only")
    run("to-hf", tmp_path / "megatron", tmp_path / "merged", *options, "--merge-adapter")
    loaded = peft.PeftModel.from_pretrained(transformers_model(tmp_path / "base"), tmp_path / "peft")
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits[0], logits, rtol=0, atol=1e-5)
    state = loaded.merge_and_unload().state_dict()
    ours = transformers_model(tmp_path / "merged").state_dict()
    for name, value in state.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-6, msg=name)


def _model(folder: Path) -> tuple[str, str]:
    (folder / "model.json").write_text(json.dumps({"base": "super-tiny", **_fields()}))
    return "--model", str(folder / "model.json")


def _fields() -> dict[str, object]:
    from dataclasses import asdict

    from megatron_nemotron3.models import get

    old, new = asdict(get("super-tiny")), asdict(MODEL)
    return {key: value for key, value in new.items() if value != old[key] and key not in ("name", "title")}


_LAYER_1 = "model.layers.1.mixer"
_TARGETS = json.loads((FOLDER / "adapter_config.json").read_text())["target_modules"]


def test_pairs_of_numbers_that_are_not_floating_point(
    base: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a quantized adapter has them, beside scales that plain LoRA does not know."""
    tensors = load_file(shared / "adapter_model.safetensors")
    name = min(tensors)
    save_file({**tensors, name: tensors[name].to(torch.int8)}, shared / "adapter_model.safetensors")
    said = message(capsys, "from-hf", base, tmp_path / "out", "--adapter", shared, "--merge-adapter")
    assert "the pair of backbone.layers.0.mixer.in_proj is int8" in said


@pytest.mark.parametrize("part", ["in_proj.lora_A", "experts.lora_B"])
def test_a_value_that_is_nan_is_the_adapters(
    base: Path, shared: Path, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(shared / "adapter_model.safetensors")
    name = next(name for name in tensors if part in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, shared / "adapter_model.safetensors")
    run("from-hf", base, tmp_path / "lora", "--adapter", shared, "--allow-nonfinite")
    for words, file in (
        (("from-hf", base, tmp_path / "out", "--adapter", shared, "--merge-adapter"), "adapter_model"),
        (("to-hf", tmp_path / "lora", tmp_path / "out", "--merge-adapter"), "distcp: .*adapter"),
    ):
        said = message(capsys, *words)
        assert re.search(f"{file}.* has values that are NaN or infinite", said), said


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(" + "|".join(_TARGETS) + ")"},
        {"r": 9, "rank_pattern": {"none": 7, r"layers\.\d.*": RANK}},
        {"init_lora_weights": "gaussian", "use_rslora": None, "layers_to_transform": []},
    ],
    ids=str,
)
def test_fields_that_say_the_same(base: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Other words for the same matrices and ranks."""
    folder = shutil.copytree(FOLDER, tmp_path / "adapter")
    data = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**data, **fields}))
    run("from-hf", base, tmp_path / "merged", "--adapter", folder, "--merge-adapter")


def test_refused(base: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("from-hf", base, tmp_path / "plain")
    run("from-hf", base, tmp_path / "lora", "--adapter", shared)
    capsys.readouterr()
    out = tmp_path / "out"
    assert "one A" in message(capsys, "from-hf", base, out, "--adapter", FOLDER)
    assert "--merge-adapter adds it" in message(capsys, "to-hf", tmp_path / "lora", out)
    assert "has no LoRA adapter" in message(capsys, "to-hf", tmp_path / "plain", out, "--adapter-only")
    assert "of its own" in message(
        capsys, "to-hf", tmp_path / "lora", out, "--adapter", shared, "--merge-adapter"
    )
    assert "one of them" in message(
        capsys, "to-hf", tmp_path / "lora", out, "--adapter-only", "--merge-adapter"
    )
    assert "adapter_config.json" in message(capsys, "from-hf", base, out, "--adapter", base)
    for key, value, words in (
        ("use_dora", True, "only plain LoRA"),
        ("peft_type", "IA3", "only LORA"),
        ("alpha_pattern", {"q_proj": 2}, "only plain LoRA"),
        ("use_dora", 0, "only plain LoRA"),
        ("use_newest_kind", {"a": 1}, "only plain LoRA"),
        ("lora_alpha", "ten", "lora_alpha 'ten' is not a number above 0"),
        ("lora_alpha", 10**400, "is not a number above 0"),
        ("use_rslora", "yes", "use_rslora 'yes' is neither true nor false"),
        ("init_lora_weights", "pissa", "'pissa': the base has other weights"),
        ("target_parameters", [], "does not hold"),
        ("target_parameters", ["experts.up_proj"], f"a pair of {_LAYER_1}.experts.down_proj, which"),
        ("target_modules", ["q_proj"], "it has a pair of model.layers.0.mixer.in_proj, which its fields"),
        ("target_modules", [*_TARGETS, "out_proj"], "it adapts model.layers.0.mixer.out_proj, of which"),
        ("target_modules", ".*(in_proj", "'.*(in_proj' is not a pattern: missing ), unterminated"),
        ("target_modules", "(.|.)*#", "its patterns cannot be compared: it takes more than"),
        ("exclude_modules", ["q_proj"], "it has a pair of model.layers.3.mixer.q_proj, which its fields"),
        ("layers_to_transform", [0], f"it has a pair of {_LAYER_1}.fc1_latent_proj, which its fields"),
        ("layers_to_transform", "0", "layers_to_transform '0' is not a list of numbers"),
        ("rank_pattern", {"q_proj": 8}, "q_proj has rank 8, and its pair in the file has rank"),
        ("r", 0, "the rank 0 (r or rank_pattern) is not a whole number from 1 to 65,536"),
        ("r", True, "the rank True (r"),
        ("r", "4", "the rank '4' (r"),
        ("r", 10**30, "is not a whole number from 1 to 65,536"),
        ("r", RANK + 1, f"has rank {RANK + 1}, and its pair in the file has rank {RANK}"),
        ("rank_pattern", 8.5, "rank_pattern 8.5 is not an object of ranks"),
    ):
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        broken = shutil.copytree(shared, tmp_path / "broken")
        data = json.loads((broken / "adapter_config.json").read_text())
        (broken / "adapter_config.json").write_text(json.dumps({**data, key: value}))
        if value == []:  # down_proj alone: nothing but the list says which of both it is
            tensors = load_file(broken / "adapter_model.safetensors")
            kept = {n: t for n, t in tensors.items() if ".base_layer." not in n}
            save_file(kept, broken / "adapter_model.safetensors")
        assert words in message(capsys, "from-hf", base, out, "--adapter", broken), key
    assert not out.exists()


def test_an_adapter_of_rank_0(base: Path, shared: Path, tmp_path: Path, capsys: Any) -> None:
    """Its scale would be alpha / 0: in a file of peft, and in Megatron's checkpoint."""
    with pytest.raises(ValueError, match="dim=65537, .* dim at most 65,536"):
        LoRASettings(dim=65537)
    tensors = load_file(shared / "adapter_model.safetensors")
    empty = {n: t[:0] if "lora_A" in n else t[:, :0].contiguous() for n, t in tensors.items()}
    broken = shutil.copytree(shared, tmp_path / "broken")
    save_file(empty, broken / "adapter_model.safetensors")
    assert "has rank 0" in message(capsys, "from-hf", base, tmp_path / "out", "--adapter", broken)
    stem = "backbone.layers.0.mixer.in_proj"
    arrays = {
        stem + A: torch.zeros(0, 4),
        stem + B: torch.zeros(8, 0),
    }
    with pytest.raises(ValueError, match=r"lora_A \[0, 4\] of backbone.layers.0.mixer.in_proj has rank 0"):
        check_fits(StoredAdapter(InMemory(tmp_path, arrays), 8.0), {f"{stem}.weight": (8, 4)})


def test_a_built_model_gets_the_merged_weights(base: Path, shared: Path, tmp_path: Path) -> None:
    """From a checkpoint with adapters and from the merged folder; what would leave them out is refused."""
    run("from-hf", base, tmp_path / "megatron", "--adapter", shared)
    run("to-hf", tmp_path / "megatron", tmp_path / "hf", "--merge-adapter")
    settings: dict[str, Any] = {"precision": "fp32", "backend": "torch"}
    with world_of_one():
        states = []
        for folder in ("megatron", "hf"):
            model = build_model(MODEL, **settings)
            load_checkpoint(model, tmp_path / folder)
            states.append({name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)})
        assert states[0].keys() == states[1].keys()
        assert not [name for name, t in states[0].items() if not t.equal(states[1][name])]
        with pytest.raises(ValueError, match=r"it has LoRA adapters \(.*load_checkpoint merges them"):
            load_base(model, tmp_path / "megatron")
        with pytest.raises(ValueError, match=r"/hf: it is not a torch_dist .* from-hf makes one of it"):
            load_base(model, tmp_path / "hf")
        other = build_model(MODEL.but(hidden_size=2 * MODEL.hidden_size), **settings)
        with pytest.raises(ValueError, match=r"/hf: .* is \[.*\] there: is it another model\?"):
            load_checkpoint(other, tmp_path / "hf")
        with adding_lora(LoRASettings.parse("dim=2")):
            adapted = build_model(MODEL, **settings)
        with pytest.raises(ValueError, match="the model has LoRA adapters: load the weights before"):
            load_checkpoint(adapted, tmp_path / "hf")
        with pytest.raises(ValueError, match=r"adapter.*: LoRA adapters are not sent: merge them"):
            training_tensors(Training.of(MODEL, "tp=1"), 0, [adapted])
        with pytest.raises(ValueError, match=r"chunks is one model: give a list"):
            training_tensors(Training.of(MODEL, "tp=1"), 0, model)  # type: ignore[arg-type]
