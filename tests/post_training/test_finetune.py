"""`nemotron3 finetune`: a Hugging Face folder in, a Hugging Face folder out, and nothing half-done."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import shlex
import shutil
import signal
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from megatron_nemotron3 import cli
from megatron_nemotron3.common import lock
from megatron_nemotron3.common.options import from_arguments
from megatron_nemotron3.common.switches import LORA, SFT_MEAN
from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch.plan.hardware import RESERVE
from megatron_nemotron3.launch.plan.state import require_divisible
from megatron_nemotron3.models import LoRASettings, get
from megatron_nemotron3.post_training import measure
from megatron_nemotron3.post_training.finetune import command
from megatron_nemotron3.post_training.finetune import inputs as given
from megatron_nemotron3.train import processes
from megatron_nemotron3.train.data import workers
from megatron_nemotron3.train.data.conversations import Conversation, Encoder
from tests.support.engines import agreeing_tensors
from tests.support.hf_folders import write_hf
from tests.support.programs import follow_forked
from tests.train.data.test_conversations import CHAT, THINKING, say, write_lines, write_tokenizer

Capture = pytest.CaptureFixture[str]

#: Keys of a release that a training has no place for, and the length of the model, not of the rows.
SAID = {
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "eos_token_id": [2, 11],
    "pad_token_id": 0,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "time_step_max": 0.1,
    "tokenizer_class": "PreTrainedTokenizerFast",
}
LINES = [{"messages": [say("user", f"{i} apples?"), say("assistant", f"yes, {i} pears")]} for i in range(40)]


def inputs(folder: Path, vocabulary: int = 384) -> list[str]:
    """Words of the command with everything that it reads."""
    config = get("super-tiny").but(pattern="M*E", hidden_size=64, vocab_size=vocabulary, num_moe_experts=8)
    write_hf(folder / "hf", config, values=agreeing_tensors(config, 0.05, seed=4), dtype="float32")
    path = folder / "hf/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SAID))
    (folder / "hf/generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "hf/configuration_nemotron_h.py").write_text("# code\n")
    write_tokenizer(folder / "chat")
    write_lines(folder / "chats.jsonl", LINES)
    return [
        *("finetune", str(folder / "hf"), "--conversations", str(folder / "chats.jsonl")),
        *("--tokenizer", str(folder / "chat"), "--output", str(folder / "tuned")),
        *("--steps", "2", "--lr", "1e-2", "--seq-length", "128", "--device", "cpu"),
    ]


def options_of(words: list[str]) -> command.FinetuneOptions:
    """Return what the command gets."""
    parsed = cli.parser(["finetune"]).parse_args(words)
    parsed.main = cli.main
    return from_arguments(command.FinetuneOptions, parsed)


def require_all_of_the_source(source: Path, tuned: Path) -> None:
    """Every key of config.json, generation_config.json and code are the source's."""
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tuned))
    assert SAID.items() <= before.items() and before.items() <= after.items()
    for name in ("generation_config.json", "configuration_nemotron_h.py"):
        assert (tuned / name).read_bytes() == (source / name).read_bytes()


seen: list[argparse.Namespace] = []


def untrained(stopped: list[int]) -> Callable[..., int]:
    """The steps, but training copies its start; it is interrupted as often as `stopped` has statuses."""

    def step(main: object, *words: object, prefix: str = "") -> int:
        line = [str(word) for word in words]
        if line[0] != "train":
            return cli.main(line)
        cut = line.index("--") if "--" in line else len(line)
        options = cli.parser(["train"]).parse_args(line[:cut])
        options.extra = line[cut + 1 :]
        seen.append(options)
        assert options.steps in (2, 5) and options.conversations and (options.pretrained / "release").is_dir()
        assert LORA not in os.environ and not prefix
        if stopped:
            return stopped.pop()
        if not options.output.exists():
            shutil.copytree(options.pretrained, options.output / "checkpoints")
        return 0

    return step


def test_the_steps_and_a_start_after_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """What comes out of training that changes nothing is what went in, to the bit."""
    words, tuned = inputs(tmp_path), tmp_path / "tuned"
    monkeypatch.setattr(command, "step", untrained([130]))
    engines, free = [], []
    load = measure.load_engine

    def loaded(*given: Any) -> Any:
        engine = load(*given)
        engines.append(weakref.ref(engine.model))
        return engine

    monkeypatch.setattr(measure, "load_engine", loaded)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: free.append([one() for one in engines]))
    assert cli.main(words) == 130
    assert free == [[None]]  # the training has the whole GPU
    assert not (tuned / "hf").exists()
    before = (tuned / "before.json").read_bytes()
    capsys.readouterr()
    with lock.held(tuned, "the other one"):
        assert cli.main(words) == 2
    assert "the other one (wait for it, or choose another folder)" in capsys.readouterr().err
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert (tuned / "before.json").read_bytes() == before == (tuned / "after.json").read_bytes()
    assert "held-out loss    " in out and "answer after" in out
    kept = [json.loads(line) for line in (tuned / "train.jsonl").read_text().splitlines()]
    held = [json.loads(line) for line in (tuned / "held_out.jsonl").read_text().splitlines()]
    assert kept and held and sorted(map(str, kept + held)) == sorted(map(str, LINES))
    assert cli.main(["convert", "verify", str(tmp_path / "hf"), str(tuned / "hf")]) == 0
    require_all_of_the_source(tmp_path / "hf", tuned / "hf")
    assert "apples" in str(json.loads((tuned / "hf" / "tokenizer.json").read_text())["model"]["vocab"])
    # More steps: the results of the first are kept, and the same training goes on.
    at = words.index("--steps") + 1
    steps = int(words[at])
    more = [*words[:at], str(steps + 3), *words[at + 1 :]]
    assert cli.main(more) == 0
    assert f"hf of {steps} steps is now {tuned / f'hf-{steps}'}" in capsys.readouterr().out
    assert (tuned / f"after-{steps}.json").read_bytes() == (tuned / "after.json").read_bytes()
    assert {path.name for path in tuned.glob("hf*")} == {"hf", f"hf-{steps}"}
    assert cli.main(words) == 2
    assert f"another steps ({steps + 3} -> {steps}): give" in capsys.readouterr().err
    words = more
    # Another request in the same folder.
    assert cli.main([*words, "--lr", "1e-3"]) == 2
    assert "holds a fine-tuning with another lr (0.01 -> 0.001): give" in capsys.readouterr().err
    assert cli.main([*words, "--held-out", str(tmp_path / "chats.jsonl")]) == 2
    said = capsys.readouterr()
    assert "another conversations, held_out: give" in said.err
    assert "warning: 40 of 40 held-out rows are also trained on" in said.out
    assert cli.main([*words, "--format", "messages"]) == 2
    assert "holds a fine-tuning with another reading" in capsys.readouterr().err


@pytest.mark.parametrize("moment", [0, 1, 2])
def test_an_end_between_the_renames_of_the_results(
    moment: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A finished fine-tuning is given more steps; the same command goes on, whichever is renamed."""
    words, tuned = inputs(tmp_path), tmp_path / "tuned"
    checked = given.check(options_of(words), None, tmp_path / "hf", "cpu")
    given.prepare(checked, tuned)
    (tuned / "hf").mkdir()
    (tuned / "hf/config.json").write_text("{}")
    (tuned / "after.json").write_text("{}")
    more = replace(checked, record={**checked.record, "steps": 5})
    done: list[object] = []

    def interrupted(before: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            if len(done) == moment:
                raise KeyboardInterrupt
            done.append(words)
            return before(*words)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", interrupted(Path.rename))
        patch.setattr(given, "write_json", interrupted(given.write_json))
        with pytest.raises(KeyboardInterrupt):
            given.prepare(more, tuned)
    assert len(done) == moment
    if moment:  # the command of before makes its results again: none of them is written over
        given.prepare(checked, tuned)
        (tuned / "hf").mkdir()
        with pytest.raises(ValueError, match=r"hf-2: it is in the way of .*/hf: remove one of them"):
            given.prepare(more, tuned)
        (tuned / "hf").rmdir()
    for _ in range(2):
        given.prepare(more, tuned)
        assert (tuned / "hf-2/config.json").exists() and (tuned / "after-2.json").exists()
        assert not (tuned / "hf").exists() and not (tuned / "after.json").exists()


def test_files_in_another_order_are_another_training(tmp_path: Path) -> None:
    """Their rows would be packed and shuffled otherwise from the first step on."""
    words, tuned = inputs(tmp_path), tmp_path / "tuned"
    files = [str(tmp_path / "chats.jsonl"), str(tmp_path / "more.jsonl")]
    write_lines(tmp_path / "more.jsonl", [{"messages": [say("user", "a?"), say("assistant", "b")]}] * 9)
    at = words.index("--conversations") + 1
    one, other = (
        given.check(options_of([*words[:at], *order, *words[at + 1 :]]), None, tmp_path / "hf", "cpu")
        for order in (files, files[::-1])
    )
    given.prepare(one, tuned)
    with pytest.raises(ValueError, match="holds a fine-tuning with another conversations"):
        given.prepare(other, tuned)


@pytest.mark.parametrize("end", ["killed", "interrupted"])
def test_an_end_while_workers_encode_leaves_nothing(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words, tuned, here = inputs(tmp_path), tmp_path / "tuned", os.getpid()
    write_lines(tmp_path / "chats.jsonl", LINES * 20)  # those after the first 512 are encoded in workers
    monkeypatch.setattr(workers, "cores", lambda: 2)
    encode, others = Encoder.encode, psutil.Process().children()

    def ending(self: Encoder, one: Conversation) -> Any:
        if os.getpid() != here:
            with contextlib.suppress(FileExistsError):
                (tmp_path / "ended").mkdir()  # one worker alone: a later signal would end the tests
                os.kill(*((os.getpid(), signal.SIGKILL) if end == "killed" else (here, signal.SIGINT)))
        return encode(self, one)

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "encode", ending)
        status = cli.main(words)
    said = capsys.readouterr().err.splitlines()
    assert status == (2 if end == "killed" else 130)
    assert end == "interrupted" or "finetune: a worker was killed (out of memory?)" in said[-1]
    assert not any("Traceback" in line for line in said)
    assert not tuned.exists() or not os.listdir(tuned)
    gc.collect()  # the process that renders the template ends with its object
    own = [one for one in psutil.Process().children() if one not in others]
    assert not psutil.wait_procs(own, timeout=10)[1]
    monkeypatch.setattr(command, "step", untrained([]))
    assert cli.main(words) == 0 and (tuned / "hf").is_dir()


def test_three_conversations_a_layout_and_a_file_that_repeats_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Layout and Megatron's options reach the training; nothing is held out, which is said; next commands."""
    words, tuned = inputs(tmp_path), tmp_path / "tuned"
    write_lines(tmp_path / "chats.jsonl", LINES[:3])
    (tmp_path / "hf/LICENSE").write_text("terms\n")
    monkeypatch.setattr(command, "step", untrained([]))
    seen.clear()
    more = ["--tp", "2", "--ep", "2", "--split", "100,0,0", "--tensorboard", "--", "--num-workers", "0"]
    assert cli.main([*words, *more]) == 0
    out = capsys.readouterr().out
    assert "too few conversations (3) to hold some out" in out and "held-out loss" not in out
    (options,) = seen
    assert (options.tp, options.ep, options.dp) == (2, 2, None)
    assert options.extra == ["--split", "100,0,0", "--num-workers", "0"]
    assert len((tuned / "train.jsonl").read_text().splitlines()) == 3
    assert (tuned / "hf/LICENSE").read_text() == "terms\n"
    after = out.rpartition("Hugging Face  ")[2]
    commands = [line.split()[2:] for line in after.splitlines() if line.startswith("next ")]
    assert [line[0] for line in commands] == ["chat", "serve"]
    cli.parser(["chat"]).parse_args(commands[0])
    words = ["evaluate", str(tuned / "hf"), "--tokenizer", str(tuned / "tokenizer"), "--device", "cpu"]
    assert cli.main([*words, "--conversations", str(tmp_path / "chats.jsonl")]) == 0
    assert "chats.jsonl: 3 rows of OpenAI's messages\n" in capsys.readouterr().out
    # The file repeats the run elsewhere; the command line counts before it.
    assert (
        cli.main(["finetune", "--config", str(tuned / "config.yaml"), "--output", str(tmp_path / "b")]) == 0
    )
    again = seen[-1]
    assert again.output == tmp_path / "b/run" and (again.tp, again.lr) == (2, 1e-2)
    assert again.extra == ["--split", "100,0,0", "--num-workers", "0"]


@pytest.mark.parametrize("way", ["--mtp-from", "--mtp-num-layers"])
def test_a_model_that_has_lost_mtp(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Another fine-tune's folder: MTP of the original is put back, or left out."""
    words, original = inputs(tmp_path), tmp_path / "original"
    (tmp_path / "hf").rename(original)
    values = load_file(original / "model.safetensors")
    heads = {name for name in values if name.startswith("mtp.")}
    shutil.copytree(original, tmp_path / "hf")
    lost = {name: value for name, value in values.items() if name not in heads}
    save_file(lost, tmp_path / "hf/model.safetensors")
    monkeypatch.setattr(command, "step", untrained([]))
    assert heads and cli.main(words) == 2
    assert "--mtp-from DIR takes them from there" in capsys.readouterr().err
    assert cli.main([*words, way, str(original) if way == "--mtp-from" else "0"]) == 0
    found = load_file(tmp_path / "tuned/hf/model.safetensors")
    expected = values if way == "--mtp-from" else lost
    assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda at: (at / "hf/model.safetensors").unlink(), "hf"),
        (lambda at: (at / "chat/tokenizer.json").unlink(), "holds no tokenizer"),
        (lambda at: write_tokenizer(at / "chat", None), "/chat has no chat template"),
        (
            lambda at: write_tokenizer(at / "chat", THINKING.replace("m.content", "m.content | upper"))
            and write_lines(at / "chats.jsonl", [*LINES, {"messages": CHAT}]),
            "does not write the content of message 2 as it is",
        ),
        (lambda at: write_lines(at / "chats.jsonl", [{"text": "a"}]), 'chats.jsonl:1: give an object'),
        (
            lambda at: write_lines(at / "chats.jsonl", [{"messages": [*CHAT * 40]}]),
            "no conversation can be trained on: 1 is longer than --seq-length 128",
        ),
        (
            lambda at: write_lines(at / "chats.jsonl", [{"messages": [say("asistant", "yes")]}]),
            "no conversation can be trained on: they have no message of the assistant",
        ),
        (lambda at: write_lines(at / "tuned", [{}]), "is no fine-tuning"),
        (lambda at: shutil.rmtree(at / "hf") or inputs(at, 512), "training would drop the rest"),
    ],
)  # fmt: skip
def test_wrong_input_ends_before_anything_is_written(
    change: Callable[[Path], object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    words = inputs(tmp_path)
    change(tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    monkeypatch.setattr(command, "step", lambda *words, **how: pytest.fail("it began"))
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--adapter-only"], "goes with --lora"),
        (["--lora", "base=x"], "leave base= out"),
        (["--steps", "0"], "--steps 0: give more than 0"),
        (["--tp", "0"], "tp=0 is not a positive integer"),
        (["--dp", "8", "--etp", "8", "--lora", "dim=4"], "LoRA dim=4 is not divisible by ETP=8"),
        (["--dp", "3", "--ep", "3"], "num_moe_experts=8 is not divisible by EP=3"),
        (["--", "--save", "x"], "--save (give --output)"),
        (["--split", "9,1,0", "--", "--split", "1,1,1"], "--split before and after --: give one"),
        (["--split", "0,100,0"], "--split 0,100,0 leaves nothing to train on"),
        (["--split", "a,b"], "--split a,b: give up to three weights"),
        (["--tensorboard", __file__], "test_finetune.py is a file: give a folder"),
        (["--global-batch-size", "3", "--dp", "2"], "is not divisible by micro_batch_size*DP=2"),
        (["--conversations", "none.jsonl"], "none.jsonl"),
        (["--push-to-hub", "a b"], "--push-to-hub a b: give OWNER/NAME"),
        (["--wandb", "a", "--", "--wandb-project", "b"], "--wandb and --wandb-project both say where"),
    ],
)
def test_wrong_words(words: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    assert cli.main([*inputs(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "tuned").exists()


def test_a_file_that_is_given_twice(tmp_path: Path, capsys: Capture) -> None:
    words, file = inputs(tmp_path), tmp_path / "chats.jsonl"
    (tmp_path / "link.jsonl").symlink_to(file)
    assert cli.main([*words, "--held-out", str(file), str(tmp_path / "link.jsonl")]) == 2
    assert "link.jsonl is given twice: give it once" in capsys.readouterr().err


def test_a_wrong_mean_ends_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv(SFT_MEAN, "rows")
    assert cli.main(inputs(tmp_path)) == 2
    assert "NEMOTRON3_SFT_MEAN='rows': use tokens or conversations" in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()


def test_experts_share_the_rank_of_their_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The training alone refuses it, too, and neither does where experts have no adapters."""
    monkeypatch.setenv(LORA, "dim=4")
    words = ["--dp", "8", "--etp", "8", "--device", "cpu", "--output", str(tmp_path / "run")]
    assert cli.main(["train", "nano", "--tiny", *words]) == 2
    assert "LoRA dim=4 is not divisible by ETP=8" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    launch = Launch.of("nano", tiny=True, dp=8, etp=8)
    require_divisible(launch, LoRASettings(dim=4, targets=("linear_qkv", "in_proj")))
    require_divisible(launch, LoRASettings(dim=8))


@pytest.mark.parametrize(
    ("longest", "sizes", "length"),
    [
        (90, {}, 512),
        (5000, {}, 5120),
        (5120, {}, 5120),
        (5000, {"tp": 3, "cp": 5}, 5760),
        (20_000, {}, 8192),
        (20_000, {"tp": 3, "cp": 5}, 7680),
    ],
)
def test_sequences_hold_the_longest_conversation(longest: int, sizes: dict[str, int], length: int) -> None:
    layout, real = ParallelLayout(**sizes), get("nano")
    assert given.default_length(longest, real, layout) == length
    assert given.default_length(longest, get("nano-tiny"), layout) == 512
    assert given.default_length(longest, real.but(max_position_embeddings=300), ParallelLayout()) == 256


def test_the_length_is_chosen_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = inputs(tmp_path)
    at = words.index("--seq-length")
    del words[at : at + 2]
    write_lines(tmp_path / "chats.jsonl", [*LINES, {"messages": CHAT * 41}])
    status, text = plan_of(capsys, words)
    line = "sequence length  1,920: the longest of 37 conversations to train on has 1,804 tokens; 0 longer"
    assert status == 0 and line in text and "sequences of 1,920 tokens" in text
    monkeypatch.setattr(given, "MOST", 600)
    monkeypatch.setattr(command, "step", untrained([]))
    seen.clear()
    assert cli.main(words) == 0
    line = "512: the longest of 37 conversations to train on has 1,804 tokens; 1 longer than this is left out"
    assert line in capsys.readouterr().out
    assert seen[0].seq_length == 512
    assert json.loads((tmp_path / "tuned/finetune.json").read_text())["seq_length"] == 512


def plan_of(capsys: Capture, words: list[str]) -> tuple[int, str]:
    """Status and text of `--plan` for an H100."""
    cut = words.index("--") if "--" in words else len(words)
    status = cli.main([*words[:cut], "--plan", "--gpu", "h100", *words[cut:]])
    found = capsys.readouterr()
    assert not found.err
    return status, found.out


@pytest.mark.parametrize("trained", [["--lora"], ["--dp", "8", "--ep", "8", "--seq-length", "4096"]])
def test_plan_says_what_does_not_fit_and_what_would(
    trained: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """It reads no conversations and writes nothing. Each change that it names makes it fit."""
    words = ["finetune", "nano", "--conversations", "none", "--output", str(tmp_path / "tuned"), *trained]
    status, text = plan_of(capsys, words)
    assert status == 1 and "\ndoes not fit: " in text
    cures = text.partition("what would fit:\n")[2].splitlines()
    assert len(cures) > 1
    for cure in cures:
        change, _, cost = cure.rpartition("   ")
        status, text = plan_of(capsys, [*words, *change.split()])
        assert status == 0 and f"\nfits: {cost.partition(' ')[0]} of 74.0 GiB" in text, cure
    assert not list(tmp_path.iterdir())


def test_the_layout_of_the_docs_fits(capsys: Capture) -> None:
    text = (Path(__file__).parents[2] / "docs/training.md").read_text()
    found = re.search(r"nemotron3 (finetune nvidia/\S+ .*?)\n```", text, re.DOTALL)
    assert found is not None
    words = shlex.split(found[1].replace("\\\n", " "))
    words[1] = "nano"
    status, out = plan_of(capsys, words)
    assert status == 0 and "fits: 72.3 of 74.0 GiB on h100" in out


def test_plan_of_a_model_that_one_gpu_cannot_measure(tmp_path: Path, capsys: Capture) -> None:
    words = ["finetune", "super", "--conversations", "none", "--output", str(tmp_path / "tuned"), "--lora"]
    status, text = plan_of(capsys, [*words, "--dp", "8", "--ep", "8", "--seq-length", "512"])
    assert status == 0 and "\nfits: " in text
    assert "\nheld-out loss: measured in this layout, without an answer: 230.2 GiB of weights" in text


def test_plan_of_a_folder_and_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    words = inputs(tmp_path)
    status, text = plan_of(capsys, words)
    assert status == 0 and "/hf: all weights, 1 rank, bf16, sequences of 128 tokens" in text
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for more, message in (
        (["--plan"], "--plan: torch sees no GPU here: give --gpu, one of h100"),
        (["--gpu", "h100"], "--gpu h100 goes with --plan"),
        (["--plan", "--gpu", "h100", "--ep", "3"], "cannot be launched"),
    ):
        assert cli.main([*words, *more]) == 2
        assert message in capsys.readouterr().err
    here = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=79 << 30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: here)
    assert cli.main([*words, "--plan", "--dp", "16", "--ep", "8"]) == 0
    assert "of 73.0 GiB on NVIDIA H100 80GB HBM3" in capsys.readouterr().out
    # More ranks than GPUs, and no number of machines has as many: before anything is written.
    monkeypatch.setattr(command, "resolve_device", lambda *given: "cuda")
    for more in ([], ["--plan"]):
        assert cli.main([*words, "--dp", "12", *more]) == 2
        assert "12 ranks, but this machine has 8 GPUs: give a layout of at most 8" in capsys.readouterr().err
    assert not (tmp_path / "tuned").exists()


def test_where_the_held_out_loss_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """On one GPU if the model fits, else by the training's ranks; not at all if they need more machines."""
    options = options_of([*inputs(tmp_path), "--dp", "8", "--ep", "8"])
    checked = given.check(options, None, tmp_path / "hf")
    found = SimpleNamespace(total_memory=79 << 30)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: found)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    here = command._held_out(options, checked, "cuda")
    assert here is not None and here.launch is None
    found.total_memory = RESERVE
    apart = command._held_out(options, checked, "cuda")
    assert apart is not None and apart.launch is not None and apart.launch.layout.ep == 8
    on_cpu = command._held_out(options, checked, "cpu")
    assert on_cpu is not None and on_cpu.launch is None
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert command._held_out(options, checked, "cuda") is None
    out = capsys.readouterr().out
    assert "held-out loss not measured, which would need 2 machines: nemotron3 evaluate" in out


@pytest.mark.full
def test_trained_and_measured_in_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The ranks merge the adapters of a run as the single process does."""
    monkeypatch.setattr(processes, "follow", follow_forked)
    monkeypatch.setattr(command, "has_room", lambda *given: False)
    tuned = tmp_path / "tuned"
    assert cli.main([*inputs(tmp_path), "--lora", "dim=4", "--tp", "2", "--ep", "2"]) == 0
    out = capsys.readouterr().out
    assert "held-out loss    " in out and "answer after" not in out
    before, after = (json.loads((tuned / f"{name}.json").read_text()) for name in ("before", "after"))
    assert after["per_token"] < before["per_token"]
    words = ["evaluate", str(tuned / "hf"), "--tokenizer", str(tuned / "tokenizer"), "--device", "cpu"]
    assert cli.main([*words, "--conversations", str(tuned / "held_out.jsonl"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["per_token"] == pytest.approx(after["per_token"], rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("lora", [[], ["--lora", "dim=4"], ["--lora", "dim=4", "--adapter-only"]])
def test_trained(lora: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """A few steps move the held-out loss, and the folder holds what was trained."""
    monkeypatch.setattr(processes, "follow", follow_forked)
    words, tuned = inputs(tmp_path), tmp_path / "tuned"
    words[words.index("--steps") + 1] = "6"
    assert cli.main([*words, *lora]) == 0
    before, after = (json.loads((tuned / f"{name}.json").read_text()) for name in ("before", "after"))
    assert after["per_token"] < before["per_token"]
    capsys.readouterr()
    if "--adapter-only" in lora:
        assert (tuned / "hf" / "adapter_model.safetensors").exists()
        written = json.loads((tuned / "hf/adapter_config.json").read_text())
        assert written["base_model_name_or_path"] == str(tmp_path / "hf")
        assert (tuned / "hf/tokenizer.json").exists()
    else:
        assert cli.main(["convert", "verify", str(tuned / "run"), str(tuned / "hf")]) == 0
        require_all_of_the_source(tmp_path / "hf", tuned / "hf")
        assert cli.main(["convert", "verify", str(tmp_path / "hf"), str(tuned / "hf")]) == 1
    assert LORA not in os.environ


def test_several_files_and_what_no_answer_is_in(tmp_path: Path, capsys: Capture) -> None:
    """All rows of all files; of rows without an answer their number and roles are printed."""
    words = inputs(tmp_path)
    write_lines(tmp_path / "more.jsonl", [{"messages": [say("user", f"{i}?")]} for i in range(3)])
    write_lines(tmp_path / "typo.jsonl", [{"messages": [say("asistant", "yes")], "scor": 1}, *LINES[:2]])
    for more in ([str(tmp_path / "more.jsonl")], ["--conversations", str(tmp_path / "more.jsonl")]):
        at = words.index("--tokenizer")
        given_words = [*words[:at], *more, *words[at:], "--held-out", str(tmp_path / "typo.jsonl")]
        options = options_of(given_words)
        found = given.check(options, None, tmp_path / "hf", "cpu")
        assert len(found.train) == 43 and len(found.held_out) == 3
        out = capsys.readouterr().out
        first = f"(1 time, first {tmp_path / 'typo.jsonl'}:1)"
        assert f"held-out conversations: field 'scor' is not used {first}" in out
        assert "3 conversations to train on: no message of the assistant (roles: user)" in out
        assert (
            "1 conversation held out: no message of the assistant (roles: asistant)" in out
            and "warning: 2 of 3 held-out rows are also" in out
        )


@pytest.mark.parametrize(("lora", "rank"), [("", 32), ("dim=16", 16), ("dim=40,alpha=8", 64)])
def test_vllm_takes_the_rank_of_an_adapter(lora: str, rank: int, tmp_path: Path) -> None:
    words = [*inputs(tmp_path), "--lora", lora, "--adapter-only"]
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned/held_out.jsonl").touch()
    options = options_of(words)
    serve = command.next_commands(options)[-1]
    assert f"--max-lora-rank {rank} --tokenizer {tmp_path}/tuned/tokenizer" in serve
