"""`nemotron3 generate`: its output, and one-line errors for invalid input."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3 import cli
from megatron_nemotron3.inference.generate.checkpoint_folder import CheckpointFolder
from megatron_nemotron3.inference.generate.decode import load
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
from megatron_nemotron3.inference.generate.text import Detokenizer, OutputStream, OutputText, Tokenizer
from megatron_nemotron3.models import get
from megatron_nemotron3.train.data import train_tokenizer
from tests.support.engines import agreeing_tensors, repeatable
from tests.support.generation_folders import TEXT, TOKENS, Folders, small_config
from tests.support.hf_folders import write_hf

Capture = pytest.CaptureFixture[str]
PROMPT = "line 7: the naïve"


def run(capsys: Capture, *words: object) -> str:
    """Standard output of a successful command; its time is on standard error, and with --json nowhere."""
    status = cli.main(["generate", "--device", "cpu", *map(str, words)])
    out, err = capsys.readouterr()
    said = r"(, acceptance length [1-9]\.\d\d of at most 4)" + "?" * ("--draft" not in words)
    time = "" if "--json" in words else rf"[\d,]+ tokens in [\d.]+ s, [\d.,]+ tokens/s{said}\n"
    assert status == 0 and re.fullmatch(time, err) and "tokens/s" not in out
    return out


def expected(folder: Path, tokenizer: Tokenizer, prompts: list[str], new: int) -> list[list[int]]:
    """Tokens of plain decoding, without padding."""
    engine = Engine(load(folder, vocab_size=TOKENS))
    rows = generate(
        engine, [tokenizer.encode(p) for p in prompts], GenerationOptions(new, stop=tokenizer.stop)
    ).rows
    return [row.tokens for row in rows]


@pytest.mark.parametrize("words", [["--draft", "3"], ["--no-stream"]])
def test_the_text_is_on_stdout_alone(folders_with_text: Folders, capsys: Capture, words: list[str]) -> None:
    f = folders_with_text
    tokenizer = Tokenizer(f.tokenizer)
    [tokens] = expected(f.megatron, tokenizer, [PROMPT], 24)
    out = run(capsys, f.run, "--prompt", PROMPT, "--max-new-tokens", 24, *words)
    text = tokenizer.decode(tokens)
    assert max(tokens) < TOKENS and out == text.removesuffix("\n") + "\n"


def test_show_of_a_folder(folders_with_text: Folders, capsys: Capture) -> None:
    f = folders_with_text
    for folder, vocabulary in ((f.run, small_config().vocab_size), (f.hf, small_config().vocab_size)):
        assert cli.main(["show", str(folder), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        found = facts["config"]
        assert facts["stored_bytes"] == {"float32": 4 * facts["parameters"]["checkpoint"]["stored"]}
        assert found["pattern"] == "M*E" and found["num_moe_experts"] == 8, folder
        assert found["vocab_size"] == vocabulary
    for words, message in (
        (["show", f.hf.parent], "no checkpoint"),
        (["show", f.hf, "--tiny"], "drop it"),
        (["flags", f.hf], "is a folder: give a name of the catalog or JSON"),
    ):
        assert cli.main([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert message in err and err.count("\n") == 1 and out == ""


def test_a_name_of_the_catalog_goes_before_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "super").mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["show", "super"]) == 0 and "Super 120B" in capsys.readouterr().out
    assert cli.main(["show", "./super"]) == 2 and "no checkpoint" in capsys.readouterr().err


def test_every_kind_of_folder(folders_with_text: Folders, capsys: Capture, tmp_path: Path) -> None:
    """Also a checkpoint inside its run, and a run that was moved."""
    f = folders_with_text
    moved = tmp_path / "elsewhere"
    shutil.copytree(f.run, moved)
    iteration = next(p for p in f.megatron.iterdir() if p.is_dir())
    asked = ["--prompt", PROMPT, "--max-new-tokens", 8, "--json"]
    texts = [
        json.loads(run(capsys, place, *asked))["texts"]
        for place in (f.run, f.megatron, iteration, f.hf, moved)
    ]
    with pytest.raises(ValueError):
        load(f.hf, get("nano-tiny"))
    # A Hugging Face folder states the size of the vocabulary, so nothing is taken for padding there.
    del texts[3]
    assert all(found == texts[0] for found in texts)
    again = run(capsys, f.hf, "--tokenizer", f.tokenizer, *asked)
    assert len(json.loads(again)["texts"][0]["tokens"]) == 8


def test_json(folders_with_text: Folders, capsys: Capture) -> None:
    f, prompts = folders_with_text, [PROMPT, "good, 𝄞"]
    words = [f.run, "--prompt", prompts[0], "--prompt", prompts[1], "--max-new-tokens", 20]
    plain = json.loads(run(capsys, *words, "--json"))
    tokenizer = Tokenizer(f.tokenizer)
    tokens = expected(f.megatron, tokenizer, prompts, 20)
    assert [t["tokens"] for t in plain["texts"]] == tokens
    assert [t["text"] for t in plain["texts"]] == [tokenizer.decode(row) for row in tokens]
    assert [t["prompt_tokens"] for t in plain["texts"]] == [len(tokenizer.encode(p)) for p in prompts]
    assert plain["new_tokens"] == sum(map(len, tokens)) and plain["speculation"] is None
    drafted = json.loads(run(capsys, *words, "--json", "--draft", 2))
    assert drafted["texts"] == plain["texts"]
    s = drafted["speculation"]
    assert s["draft"] == 2 and len(s["acceptance_by_position"]) == 2
    assert s["acceptance_length"] == pytest.approx((drafted["new_tokens"] - 2) / s["verifications"])
    assert drafted["passes"] < plain["passes"]
    scored = json.loads(run(capsys, *words, "--json", "--logprobs"))["texts"]
    assert all(len(text.pop("logprobs")) == len(text["tokens"]) for text in scored)
    assert scored == plain["texts"]


def test_a_narrow_model_computes_in_one_thread(
    folders_with_text: Folders, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    words = [folders_with_text.run, "--prompt", PROMPT, "--max-new-tokens", 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run(capsys, *words)
    assert asked == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    run(capsys, *words)
    assert asked == [1]


def test_a_stop_text_ends_the_text(folders_with_text: Folders, capsys: Capture) -> None:
    f = folders_with_text
    words = [f.run, "--prompt", PROMPT, "--max-new-tokens", 40, "--draft", 3]
    [free] = json.loads(run(capsys, *words, "--json"))["texts"]
    stop = free["text"][9:12]
    [cut] = json.loads(run(capsys, *words, "--json", "--stop", "no such text", "--stop", stop))["texts"]
    assert cut["text"] == free["text"][: free["text"].index(stop)] and cut["stopped"]
    assert len(cut["tokens"]) < len(free["tokens"])
    out = run(capsys, *words, "--stop", stop)
    assert out.startswith(cut["text"]) and stop not in out.rpartition(" tokens in ")[0]


def test_sampling_depends_on_its_seed(folders_with_text: Folders, capsys: Capture) -> None:
    words = [folders_with_text.run, "--prompt", PROMPT, "--max-new-tokens", 16, "--json"]
    draw = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.95]
    found = [
        json.loads(run(capsys, *words, *draw, "--seed", seed, "--draft", draft))["texts"]
        for seed, draft in ((1, 0), (1, 0), (2, 0), (1, 2), (1, 2))
    ]
    assert found[0] == found[1] != found[2] and found[3] == found[4]


def test_a_prompt_from_a_file(
    folders_with_text: Folders, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt").write_text(PROMPT + "\n", encoding="utf-8")
    asked = [folders_with_text.run, "--max-new-tokens", 4, "--json"]
    texts = [
        json.loads(run(capsys, *asked, *words))["texts"]
        for words in (["--prompt", PROMPT], ["--prompt-file", tmp_path / "prompt"])
    ]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    texts.append(json.loads(run(capsys, *asked, "--prompt-file", "-"))["texts"])
    assert texts[0] == texts[1] == texts[2]


# --- invalid input ------------------------------------------------------------------------------------


def refused(capsys: Capture, *words: object) -> str:
    try:
        status = cli.main(["generate", "--device", "cpu", *map(str, words)])
    except SystemExit as end:
        status = int(end.code or 0)
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no prompt: give --prompt TEXT or --prompt-file F"),
        (["--prompt", ""], "prompt 1 is empty"),
        (["--prompt", "a", "--logprobs"], "--logprobs goes with --json: add it"),
        (["--prompt", "a", "--max-new-tokens", 0], "--max-new-tokens 0: give 1 or more"),
        (["--prompt", "a", "--max-new-tokens", 256], "use --max-new-tokens 255 or less"),
        (["--prompt", "good " * 300, "--max-new-tokens", 1], "more than the 256 of the model"),
        (["--prompt", "a", "--draft", 33], "--draft 33: give 0 to 32"),
        (["--prompt", "a", "--temperature", 1, "--top-p", 0], "top_p=0.0"),
        (["--prompt", "a", "--top-k", 3], "give --temperature T"),
        (["--prompt", "a", "--stop", ""], "--stop ''"),
        (["--prompt", "a", "--tiny"], "--tiny requires --model NAME"),
        (["--prompt", "a", "--model", "supper"], "did you mean 'super'"),
        (["--prompt", "a", "--tokenizer", "/nowhere"], "--tokenizer /nowhere is missing: give a folder"),
        (["--prompt-file", "/nowhere/prompt"], "/nowhere/prompt"),
    ],
)
def test_bad_options(folders_with_text: Folders, capsys: Capture, words: list[Any], message: str) -> None:
    assert message in refused(capsys, folders_with_text.run, *words)


def test_bad_folders(folders_with_text: Folders, capsys: Capture, tmp_path: Path) -> None:
    f = folders_with_text
    asked = ["--prompt", "a", "--max-new-tokens", 2]
    assert "it does not exist" in refused(capsys, tmp_path / "no", *asked)
    assert "there is no checkpoint in it" in refused(capsys, tmp_path, *asked)
    broken = tmp_path / "broken-checkpoint"
    shutil.copytree(next(p for p in f.megatron.iterdir() if p.is_dir()), broken)
    (broken / "metadata.json").unlink()
    assert "metadata.json: the file is missing" in refused(capsys, broken, *asked)
    bare = tmp_path / "bare"
    config = small_config(mtp=False)
    write_hf(bare, config, values=agreeing_tensors(config, 0.1), dtype="float32")
    assert "no tokenizer found" in (message := refused(capsys, bare, *asked))
    assert "give --tokenizer DIR" in message
    # Megatron's main saves the tokenizer inside the checkpoint.
    shutil.copytree(f.tokenizer, bare / "tokenizer")
    assert CheckpointFolder(bare).tokenizer().folder == bare / "tokenizer"
    words = [bare, "--tokenizer", f.tokenizer, *asked, "--draft", 2]
    assert "has no MTP block to draft with: leave it out" in refused(capsys, *words)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    words = [f.run, "--tokenizer", tmp_path / "broken", *asked]
    assert "not a tokenizer" in refused(capsys, *words)
    large = train_tokenizer([TEXT], 700, tmp_path / "large")
    message = refused(capsys, f.run, "--tokenizer", tmp_path / "large", *asked)
    assert f"its {large.vocab_size} tokens are more than the 512 of" in message


# --- streaming text -----------------------------------------------------------------------------------


@repeatable(60)
@given(st.lists(st.integers(0, TOKENS - 1), max_size=120))
def test_pieces_add_up_to_the_text(folders_with_text: Folders, ids: list[int]) -> None:
    """Any tokens, including invalid UTF-8."""
    tokenizer = Tokenizer(folders_with_text.tokenizer)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.end()]) == tokenizer.decode(ids)


@repeatable(40)
@given(st.text(st.sampled_from("abc é€𝄞ßñ\n"), max_size=60))
def test_no_piece_has_half_a_character(folders_with_text: Folders, text: str) -> None:
    tokenizer = Tokenizer(folders_with_text.tokenizer)
    stream, shown = Detokenizer(tokenizer), ""
    for token in tokenizer.encode(text):
        shown += stream.push(token)
        assert text.startswith(shown)
    assert shown == text


@repeatable(60)
@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), max_size=2))
def test_nothing_of_a_stop_text_is_shown(folders_with_text: Folders, text: str, stops: list[str]) -> None:
    tokenizer = Tokenizer(folders_with_text.tokenizer)
    passage, shown = OutputText(tokenizer, stops), ""
    for token in (token for c in text for token in tokenizer.encode(c)):
        ended = passage.push(token)
        shown += passage.take()
        if ended:
            break
    passage.end()
    shown += passage.take()
    # The text up to the stop text that is completed first.
    ends = [(at + len(s), at) for s in stops if (at := text.find(s)) >= 0]
    first = min((end for end, _ in ends), default=None)
    assert shown == (text if first is None else text[: min(at for end, at in ends if end == first)])
    assert (passage.stopped_by is None) == (first is None)


def test_the_stream_prints_rows_in_turn(folders_with_text: Folders, capsys: Capture) -> None:
    """The second row ends first; it is printed after the first has ended."""
    tokenizer = Tokenizer(folders_with_text.tokenizer)
    a, b = tokenizer.encode("naïve café"), tokenizer.encode("not")
    stream = OutputStream(["x", "y"], tokenizer, (), live=True)
    for token in b:
        stream.push(1, token)
    for token in a:
        stream.push(0, token)
    assert capsys.readouterr().out == "--- prompt 1: 'x'\nnaïve café"
    stream.end()
    stream.print_rest()
    assert capsys.readouterr().out == "\n--- prompt 2: 'y'\nnot\n"
