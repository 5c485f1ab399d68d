"""The launch's own script on forked ranks: its data (text, or conversations where the launch fine-tunes), its
log, what its optimizers saw, its checkpoints."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from random import Random

from megatron_nemotron3.common.ranks import Call, free_port, run_ranks
from megatron_nemotron3.common.switches import BOOST
from megatron_nemotron3.proof.certify.case import TrainingCase
from megatron_nemotron3.proof.certify.ranks import PRELOAD, be_alone
from megatron_nemotron3.train import log
from megatron_nemotron3.train.data.indexed import write_dataset
from megatron_nemotron3.train.data.tokenizer import TokenizerInfo
from megatron_nemotron3.train.processes import ENTRY

_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
_MARKS = ("<unk>", "<pad>", "<user>", "<assistant>", "<end>")
_SPLIT = ("--split", "90,10,0")
#: Conversations or documents.
_COUNT = 200


def write_text(folder: Path, tokens: int, longest: int, blended: bool, seed: int = 0) -> list[str]:
    """Write few long documents and many short ones, so that another number of tokens of each row ends a
    document; return the options that read them."""
    random, tokenizer = Random(seed), TokenizerInfo("NullTokenizer", None, vocab_size=tokens, eod=tokens - 1)
    names = ("text", "more") if blended else ("text",)
    for name in names:
        documents = (
            "".join(chr(random.randrange(tokens - 1)) for _ in range(random.randint(1, most)))
            for most in random.choices((8, 2 * longest), weights=(4, 1), k=_COUNT)
        )
        write_dataset(documents, tokenizer, folder / name)
    text = [str(folder / name) for name in names]
    return ["--data-path", *(["1", text[0], "2", text[1]] if blended else text), *_SPLIT, *tokenizer.flags]


def write_conversations(folder: Path, tokens: int, longest: int, seed: int = 0) -> list[str]:
    """Write conversations of up to `longest` tokens, and a tokenizer; return the options that read them.

    Their lengths are multiples of 8: what context parallelism pads would else go into other rows.
    """
    random, names = Random(seed), [f"w{i}" for i in range(tokens - len(_MARKS))]

    def message(role: str, count: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(random.choices(names, k=count))}

    lines = []
    for _ in range(_COUNT):
        inside = 8 * random.randint(1, longest // 16) - 4  # without the marks of two messages
        question = random.randint(1, inside - 1)
        lines.append({"messages": [message("user", question), message("assistant", inside - question)]})
    file, tokenizer = folder / "conversations.jsonl", folder / "tokenizer"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = {
        "type": "WordLevel",
        "vocab": {word: i for i, word in enumerate((*_MARKS, *names))},
        "unk_token": "<unk>",
    }
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    split = {"type": "WhitespaceSplit"}
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": split, "model": model})
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<end>"},
        "chat_template": _TEMPLATE,
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    return [
        *("--data-path", str(file), *_SPLIT, "--tokenizer-type", "SFTTokenizer"),
        *("--tokenizer-model", str(tokenizer), "--sft-tokenizer-prompt-format", "default"),
    ]


#: Shapes of the learning rate, the default first.
_STYLES = ("linear", "constant", "cosine", "inverse-square-root", "WSD")


def schedule_of(given: Mapping[str, Sequence[str]]) -> list[str]:
    """Options of two steps that change the learning rate as a launch does: the warm-up ends between them.

    The decay has three steps, because after half of it a line and a cosine are equal.

    given: option -> values of the launch.
    """

    def value(name: str, default: str) -> str:
        return (given.get(name) or (default,))[0]

    style = value("--lr-decay-style", _STYLES[0])
    style = style if style in _STYLES else _STYLES[0]
    words = ["--lr-decay-style", style, "--lr-decay-iters", "3", "--min-lr", "1e-3"]
    if style == "WSD":
        words += ["--lr-wsd-decay-iters", "2"]
        words += ["--lr-wsd-decay-style", value("--lr-wsd-decay-style", "exponential")]
    if any(name.startswith("--lr-warmup-") and value(name, "0") != "0" for name in given):
        words += ["--lr-warmup-fraction", "0.25", "--lr-warmup-init", "2e-3"]
    return words


#: Of a checkout of Megatron-LM.
STOCK = "pretrain_hybrid.py"


def script_of(checkout: Path | None) -> Path:
    """Return the script to run: the stock one of a checkout, or this package's own."""
    return ENTRY if checkout is None else checkout / STOCK


def run_script(
    words: Sequence[str],
    case: TrainingCase,
    folder: Path,
    timeout: float,
    killed_in: Path | None = None,
    own: bool = False,
) -> None:
    """Run a script on the ranks of a case's layout.

    Args:
        words: options of the launcher, the script and its own.
        folder: for logs and observations.
        killed_in: in this folder the ranks are killed when the second checkpoint is about to be complete.
        own: whether weights are drawn as on GPUs, and not alike in all layouts, and what a step computes with
            is noted, too.

    Raises:
        RuntimeError: a rank failed; the message is the last line of its traceback, or of its log.
        TimeoutError: a rank did not end.
    """
    folder.mkdir(parents=True)
    call = Call(_on_rank, (list(words), folder, case.fault, killed_in, own), environment=_environment(case))
    ranks = case.layout.world_size
    try:
        run_ranks(call, ranks, timeout=timeout, preload=PRELOAD)
    except RuntimeError as problem:
        if not (folder / _KILLED).exists():
            rank = _failed_rank(problem)
            raise RuntimeError(f"rank {rank} of {ranks}: {_reason(folder, rank, problem)}") from None
    else:
        if killed_in is not None:
            raise RuntimeError("the script ended without a second checkpoint")
    finally:
        _end_sessions(folder)


def run_each_script(runs: Mapping[Path, Sequence[str]], case: TrainingCase, timeout: float) -> None:
    """Run a script several times at the same time, each in one process.

    Args:
        runs: folder for logs and observations -> options of the launcher, the script and its own.
        case: of the layout of one rank.

    Raises:
        RuntimeError, TimeoutError: as `run_script`.
    """
    for folder in runs:
        folder.mkdir(parents=True)
    call = Call(_on_one_of, (list(runs.items()), case.fault), environment=_environment(case))
    try:
        run_ranks(call, len(runs), timeout=timeout * len(runs), preload=PRELOAD)
    except RuntimeError as problem:
        folder = list(runs)[_failed_rank(problem)]
        raise RuntimeError(f"rank 0 of 1: {_reason(folder, 0, problem)}") from None
    finally:
        for folder in runs:
            _end_sessions(folder)


def _environment(case: TrainingCase) -> dict[str, str]:
    boost = {BOOST: case.boost} if case.boost is not None else {}
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **boost}


def curve_of(folder: Path, ranks: int) -> log.Curve:
    """What the ranks of a run have logged."""
    curve = log.Curve()
    for rank in range(ranks):
        found = log.read(str(_log(folder, rank)))
        curve.steps |= found.steps
        curve.validation |= found.validation
    return curve


def _failed_rank(problem: RuntimeError) -> int:
    """The rank that failed first."""
    return int(str(problem).split(maxsplit=2)[1])


def _reason(folder: Path, rank: int, problem: RuntimeError) -> str:
    """The last line of a failed rank's traceback, or of its log if it just left."""
    reason = str(problem).strip().splitlines()[-1].strip()
    if reason.startswith("SystemExit") or "exit code" in reason:
        with suppress(OSError, IndexError):
            reason = _log(folder, rank).read_text(errors="replace").strip().splitlines()[-1]
    return reason


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.log"


_KILLED = "killed"
_SESSION = "session"


def sessions(folder: Path) -> list[int]:
    """Process groups of the ranks: each with the processes that it has started."""
    return [int(path.suffix[1:]) for path in folder.glob(f"{_SESSION}.*")]


def _end_sessions(folder: Path) -> None:
    for group in sessions(folder):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        (folder / f"{_SESSION}.{group}").unlink(missing_ok=True)


# What follows runs on the ranks.


def _on_one_of(runs: Sequence[tuple[Path, Sequence[str]]], fault: Callable[[], None] | None) -> None:
    folder, words = runs[be_alone()]
    os.environ["MASTER_PORT"] = str(free_port())
    _on_rank(words, folder, fault, None, False)


def _on_rank(
    argv: Sequence[str],
    folder: Path,
    fault: Callable[[], None] | None,
    killed_in: Path | None,
    own: bool,
) -> None:
    from megatron_nemotron3.cpu.async_save import forked_results
    from megatron_nemotron3.cpu.megatron import initialized_by_rank
    from megatron_nemotron3.proof.certify.observer import OptimizerObserver
    from megatron_nemotron3.proof.certify.script_definition import BatchWatch
    from megatron_nemotron3.run import main

    rank = int(os.environ["RANK"])
    os.setsid()
    (folder / f"{_SESSION}.{os.getpid()}").touch()
    output = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["PYTHONWARNINGS"] = "ignore"
    if fault is not None:
        fault()
    alone = os.environ["WORLD_SIZE"] == "1" and BOOST not in os.environ
    watch = BatchWatch(folder) if alone else None
    if watch is not None:
        watch.install()
    OptimizerObserver(folder, rank, own, None if watch is None else watch.write).install()
    if killed_in is not None and rank == 0:
        _kill_all_in_the_second_save(killed_in, folder)
    try:
        with forked_results(), initialized_by_rank() if own else nullcontext():
            main(list(argv))
    except SystemExit as end:  # a script may leave by it
        if end.code:
            raise
    except BaseException:
        traceback.print_exc()  # into the log, where it stands behind what led to it
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _kill_all_in_the_second_save(folder: Path, notes: Path) -> None:
    """Kill all ranks, as a power cut does, once all is written but the index that makes it a checkpoint."""
    target = str(folder / "iter_0000002")

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(args[2], int) or not args[2] & (os.O_WRONLY | os.O_RDWR):
            return
        path = os.fspath(args[0]) if isinstance(args[0], (str, os.PathLike)) else ""
        if not isinstance(path, str) or not path.startswith(target) or ".metadata" not in path:
            return
        os.close(os.open(notes / _KILLED, os.O_WRONLY | os.O_CREAT))
        others = [group for group in sessions(notes) if group != os.getpid()]
        for group in (*others, os.getpid()):
            os.killpg(group, signal.SIGKILL)

    sys.addaudithook(hook)
