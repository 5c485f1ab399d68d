"""`nemotron3 evaluate`: losses are Megatron's, and acceptance is that of `generate`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_nemotron3 import cli
from megatron_nemotron3.inference.generate.decode import load, read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.evaluate import losses, windows
from megatron_nemotron3.inference.generate.evaluate_command import data_tokens
from megatron_nemotron3.inference.generate.mtp import MTP
from megatron_nemotron3.inference.generate.text import Tokenizer
from megatron_nemotron3.models import get
from megatron_nemotron3.train.data import split_documents
from tests.support.checkpoint_pair import pair
from tests.support.engines import agreeing, agreeing_tensors, tiny
from tests.support.engines import text as random_text
from tests.support.generation_folders import TEXT, VOCABULARY, Folders, small_config
from tests.support.hf_folders import write_hf
from tests.support.parity import forward
from tests.train.data.test_conversations import say, write_lines, write_tokenizer

Capture = pytest.CaptureFixture[str]


def test_losses_are_those_of_the_hybrid_model(world: None, tmp_path: Path) -> None:
    """The losses per token that Megatron returns, and those of its MTP tracker for each depth."""
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    config = get("super-tiny")
    made = pair(config, tmp_path, seed=5)
    engine = Engine(read_weights(made.hf, config))
    ids = random_text(engine, 3, 97)
    MTPLossLoggingHelper.tracker.clear()  # it keeps the number of depths of an earlier model
    made.model.train()  # only then it notes
    try:
        with torch.no_grad():
            per_token = forward(made.model, ids[:, :-1], ids[:, 1:])
        noted = MTPLossLoggingHelper.tracker["loss_values"].tolist()
    finally:
        MTPLossLoggingHelper.tracker.clear()
    assert len(noted) == 2
    for chunk in (7, 96, 512):
        found = losses(engine, ids, 2, chunk=chunk)
        assert found.tokens == per_token.numel() == 3 * 96
        assert found.next_token == pytest.approx(float(per_token.mean()), abs=2e-5)
        assert found.depths == pytest.approx(noted, abs=2e-5)
    # Deeper depths use the same block; each has one label fewer.
    deeper = losses(engine, ids, 4)
    assert deeper.depths[:2] == pytest.approx(noted, abs=2e-5) and len(deeper.depths) == 4


def test_agreement_is_its_definition() -> None:
    """Position by position in FP64: KL, overlap, the same top token, and the chains of accepted drafts."""
    engine, _ = tiny("super")
    ids, depths = random_text(engine, 3, 33), 3
    hidden = engine.forward(ids[:, :-1], engine.new_state(3)).hidden
    p = engine.logits(hidden).double().softmax(-1)
    mtp, s = MTP(engine, 3, depths), 32
    chains = {"greedy": torch.ones(3, s).double(), "sampled": torch.ones(3, s).double()}
    expected = {name: torch.ones(3).double() for name in chains}
    for chunk in (5, 512):
        found = losses(engine, ids, depths, chunk=chunk).agreement
        assert len(found) == depths
    for depth, one in enumerate(found, 1):
        hidden = mtp.forward(depth, hidden[:, : s - depth], ids[:, depth:s]).hidden
        q = engine.logits(hidden).double().softmax(-1)
        own = p[:, depth:]
        overlap, top = torch.minimum(own, q).sum(-1), (own.argmax(-1) == q.argmax(-1)).double()
        assert one.kl == pytest.approx(float((own * (own / q).log()).sum(-1).mean()), abs=1e-5)
        assert one.overlap == pytest.approx(float(overlap.mean()), abs=1e-5)
        assert one.top1 == pytest.approx(float(top.mean()), abs=1e-9)
        for name, accepted in (("greedy", top), ("sampled", overlap)):
            chains[name] = chains[name][:, : s - depth] * accepted
            expected[name] = expected[name] + chains[name].mean(1)
            assert getattr(one, name) == pytest.approx(expected[name].tolist(), abs=1e-5)


def test_windows() -> None:
    text = list(range(23))
    assert windows(text, 5).tolist() == [[i, i + 1, i + 2, i + 3, i + 4, i + 5] for i in (0, 5, 10, 15)]
    assert windows(text, 5, 10).tolist() == [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]
    assert windows(text, 5, 1).shape == (1, 6) and windows(text, 50).tolist() == [text]
    with pytest.raises(ValueError, match="has 1 token"):
        windows([1], 5)


def test_what_is_refused() -> None:
    engine = Engine(agreeing(0.0).model, max_context=8)
    with pytest.raises(ValueError, match="windows of 3 tokens have no label at MTP depth 3"):
        losses(engine, torch.ones(1, 4, dtype=torch.long), 3)
    with pytest.raises(ValueError, match="token id 2048"):
        losses(engine, torch.tensor([[1, 2048, 3]]), 0)
    with pytest.raises(ValueError, match="max_context=8"):
        losses(engine, torch.ones(1, 10, dtype=torch.long), 0)
    assert losses(engine, torch.ones(1, 9, dtype=torch.long), 0).tokens == 8


def test_held_out_tokens_are_those_of_the_split(folders_with_text: Folders) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prefix = str(next(folders_with_text.run.glob("data/*/corpus.idx")).with_suffix(""))
    data = IndexedDataset(prefix)
    held_out = split_documents("50,50,0", len(data))[1]
    assert held_out is not None and len(held_out) < len(data)
    assert data_tokens(prefix, "50,50,0", 10**9) == np.concatenate([data[i] for i in held_out]).tolist()
    everything = data_tokens(prefix, None, 10**9)
    assert everything == np.concatenate([data[i] for i in range(len(data))]).tolist()
    assert data_tokens(prefix, None, 5) == data[0].tolist()
    with pytest.raises(ValueError, match="holds nothing out"):
        data_tokens(prefix, "100,0,0", 5)


# --- the command --------------------------------------------------------------------------------------


def run(capsys: Capture, *words: object) -> str:
    status = cli.main(["evaluate", "--device", "cpu", *map(str, words)])
    out, err = capsys.readouterr()
    assert status == 0 and err == ""
    return out


def measured(text: Tensor, folder: Path, depths: int) -> Any:
    return losses(Engine(load(folder, vocab_size=VOCABULARY)), text, depths)


def test_json_on_held_out_data(folders_with_text: Folders, capsys: Capture) -> None:
    f = folders_with_text
    words = [f.run, "--json", "--tokens", 300, "--seq-length", 50, "--draft", 3]
    found = json.loads(run(capsys, *words))
    manifest = json.loads(next(f.run.glob("data/*/manifest.json")).read_text())
    ids = data_tokens(manifest["dataset"]["prefix"], manifest["split"], 10**9)
    expected = measured(windows(ids, 50, 300), f.megatron, 3)
    assert found["tokens"] == expected.tokens == 300
    assert found["loss"] == pytest.approx(expected.next_token, abs=1e-6)
    assert found["mtp_loss"] == pytest.approx(list(expected.depths), abs=1e-6)
    assert found["mtp_num_layers"] == 2
    for one, other in zip(found["mtp_agreement"], expected.agreement, strict=True):
        assert one["kl"] == pytest.approx(other.kl, abs=1e-6)
        assert one["greedy"] == pytest.approx(other.greedy) and len(one["sampled"]) == 6
    assert [a["draft"] for a in found["acceptance"]] == [0, 1, 2, 3]
    lengths = [a["acceptance_length"] for a in found["acceptance"]]
    assert lengths[0] == 1.0 and lengths[3] > 1.0
    for one in found["acceptance"]:
        assert len(one["acceptance_by_position"]) == one["draft"] and one["tokens_per_second"] > 0


def test_table_of_a_text(
    folders_with_text: Folders, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, path = folders_with_text, tmp_path / "text.txt"
    path.write_text(TEXT[:4000], encoding="utf-8")
    words = [f.run, "--text", path, "--draft", 1]
    out = run(capsys, *words)
    tokenizer = Tokenizer(f.tokenizer)
    ids = [*tokenizer.encode(TEXT[:4000]), tokenizer.stop[0]]
    text = windows(ids, 256, 16384)
    expected = measured(text, f.megatron, 2)
    for name, loss in zip(
        ("next token", "MTP depth 1", "MTP depth 2"), (expected.next_token, *expected.depths)
    ):
        assert re.search(rf"^  {name} +{loss:.4f}$", out, re.M)
    assert f"{expected.tokens:,} tokens in {len(text)} windows of 256" in out
    assert "drafts against the model's own next-token distribution" in out
    for depth, one in enumerate(expected.agreement, 1):
        assert re.search(rf"^ +{depth} +{one.kl:.4f} +{one.overlap:.4f} +{one.top1:.4f} ", out, re.M)
    # Where drafts cost more time than they save, there is no speed to compare.
    assert re.search(r"^ +1 +[12]\.\d\d +[01]\.\d\d$", out, re.M)
    assert "no tokens/s: in measurements drafts saved time at hidden size 1,024" in out
    monkeypatch.setattr("megatron_nemotron3.inference.generate.evaluate_command._PAYS", 64)
    assert re.search(r"^ +1 +[12]\.\d\d +[\d.,]+ +[01]\.\d\d$", run(capsys, *words), re.M)


def test_the_loss_is_over_the_padded_vocabulary(capsys: Capture, tmp_path: Path) -> None:
    """As in Megatron, although the checkpoint states how many rows are tokens."""
    config = small_config().but(vocab_size=500)
    write_hf(tmp_path / "hf", config, values=agreeing_tensors(config, 0.1), dtype="float32")
    words = ["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "megatron"), "--workers", "1"]
    assert cli.main([*words, "--dtype", "float32"]) == 0
    capsys.readouterr()
    (tmp_path / "t").mkdir()
    prefix = tmp_path / "data"
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    ids = torch.randint(500, (257,), generator=torch.Generator().manual_seed(0))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    builder.add_document(ids, [257])
    builder.finalize(f"{prefix}.idx")
    asked = ["--data-path", prefix, "--draft", 0, "--json"]
    both = [json.loads(run(capsys, tmp_path / kind, *asked)) for kind in ("hf", "megatron")]
    engine = Engine(load(tmp_path / "hf"))
    logits = engine.forward(ids[None, :-1], engine.new_state()).logits
    # The converter pads the vocabulary with zeros: 12 more logits of 0.
    logits = torch.nn.functional.pad(logits, (0, 12))
    padded = torch.nn.functional.cross_entropy(logits[0], ids[1:])
    assert both[1]["loss"] == pytest.approx(float(padded), abs=1e-5)
    assert both[0]["loss"] < both[1]["loss"] - 1e-4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", 0], "--tokens 0"),
        (["--seq-length", 257], "--seq-length 257: give 1 to 256"),
        (["--seq-length", 5, "--draft", 5], "no label at MTP depth 5"),
        (["--data-path", "/nowhere/x"], "/nowhere/x: there is no /nowhere/x.bin and .idx"),
    ],
)
def test_bad_options(folders_with_text: Folders, capsys: Capture, words: list[Any], message: str) -> None:
    try:
        status = cli.main(["evaluate", "--device", "cpu", str(folders_with_text.run), *map(str, words)])
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and message in err and err.count("\n") == 1


def test_no_data(folders_with_text: Folders, capsys: Capture) -> None:
    assert cli.main(["evaluate", str(folders_with_text.hf), "--device", "cpu"]) == 2
    assert "give --text PATH or --data-path PREFIX" in capsys.readouterr().err


def test_conversations_are_measured_alone(world: None, tmp_path: Path) -> None:
    """Against Megatron's token losses of each; only marked tokens count, in both means."""
    from megatron_nemotron3.inference.generate.evaluate import conversation_losses
    from megatron_nemotron3.train.data.conversations import Encoded

    config = get("super-tiny")
    made = pair(config, tmp_path, seed=5)
    engine = Engine(read_weights(made.hf, config))
    lengths, prompts = (31, 9, 20), (5, 8, 13)
    texts = [random_text(engine, 1, n)[0].tolist() for n in lengths]
    encoded = [Encoded(ids, [i >= p for i in range(len(ids))]) for ids, p in zip(texts, prompts)]
    found = conversation_losses(engine, [*encoded, Encoded([1, 2, 3], [False] * 3)])
    parts = []
    with torch.no_grad():
        for ids, prompt in zip(texts, prompts):
            row = torch.tensor([ids])
            parts.append(forward(made.model, row[:, :-1], row[:, 1:])[0, prompt - 1 :])
    assert (found.tokens, found.conversations) == (26 + 1 + 7, 3)
    assert found.per_token == pytest.approx(float(torch.cat(parts).mean()), abs=2e-5)
    assert found.per_conversation == pytest.approx(sum(float(p.mean()) for p in parts) / 3, abs=2e-5)
    with pytest.raises(ValueError, match="none of 1 conversations"):
        conversation_losses(engine, [Encoded([1, 2], [False, False])])


def test_conversations_take_the_tokenizer_of_the_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    config = get("super-tiny").but(pattern="M*E", hidden_size=64, vocab_size=384, num_moe_experts=8)
    write_hf(tmp_path / "hf", config, values=agreeing_tensors(config, 0.05, seed=4), dtype="float32")
    chats = [{"messages": [say("user", "4 apples?"), say("assistant", "yes, 4 pears")]}]
    words = ["evaluate", str(tmp_path / "hf"), "--device", "cpu", "--json"]
    words += ["--conversations", str(write_lines(tmp_path / "chats.jsonl", chats))]
    assert cli.main(words) == 2
    assert "no tokenizer found" in capsys.readouterr().err
    other = write_tokenizer(tmp_path / "chat")
    assert cli.main([*words, "--tokenizer", str(other)]) == 0
    expected = json.loads(capsys.readouterr().out)
    write_tokenizer(tmp_path / "hf")
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out) == expected and expected["tokens"] > 0


# --- a trained model ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`nemotron3 train super --tiny`, some steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    words = ["-m", "megatron_nemotron3", "train", "super", "--tiny", "--steps", "60", "--output", str(folder)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.full
def test_the_validation_loss_of_a_run(trained: Path) -> None:
    """The last validation of Megatron's loop, on the same samples."""
    log = (trained / "train.log").read_text(errors="replace")
    [logged] = re.findall(r"on validation set \| lm loss value: (\S+)", log)
    samples = _validation_samples(trained, 256)
    engine = Engine(load(trained / "checkpoints"))
    # Five validations of 8 iterations with 4 sequences; the last one is at the end.
    assert losses(engine, samples[-32:], 0).next_token == pytest.approx(float(logged), abs=1e-5)


def _validation_samples(folder: Path, s: int) -> Tensor:
    """[160, s + 1], from the indices that GPTDataset wrote to the cache."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(str(next(folder.glob("data/*/corpus.idx")).with_suffix("")))
    documents, starts, order = (
        np.load(next(folder.glob(f"data/*/cache/*-valid-{name}_index.npy")))
        for name in ("document", "sample", "shuffle")
    )
    found = []
    for i in order[:160]:
        (first, start), (last, end) = starts[i], starts[i + 1]
        pieces = [
            data[int(documents[d])][start if d == first else 0 : end + 1 if d == last else None]
            for d in range(first, last + 1)
        ]
        found.append(np.concatenate(pieces).astype(np.int64))
    return torch.tensor(np.stack(found))
