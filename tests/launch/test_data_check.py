"""What is wrong with the data of a command line; the numbers are those of Megatron's own builder."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import cli, run
from megatron_nemotron3.launch import data_check, data_sets, schedule
from megatron_nemotron3.launch.explain import explain_command
from megatron_nemotron3.models import get
from megatron_nemotron3.train import inputs, run_checks
from megatron_nemotron3.train.data import indexed
from tests.support.smallest_tokenizer import SMALLEST

#: A run of 10 steps of 2 samples of 8 tokens, with 3 evaluations of 1 step.
RUN = {
    "--seq-length": "8",
    "--global-batch-size": "2",
    "--train-iters": "10",
    "--eval-interval": "5",
    "--eval-iters": "1",
}


def write(prefix: Path, lengths: list[int]) -> str:
    indexed._write_index(Path(f"{prefix}.idx"), lengths, "uint16")
    Path(f"{prefix}.bin").write_bytes(b"\1\0" * sum(lengths))
    return str(prefix)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a: 30 documents of 40 tokens, b: 20 documents of 7, tiny: 3 documents of 2."""
    folder = tmp_path_factory.mktemp("sets")
    write(folder / "a", [40] * 30)
    write(folder / "b", [7] * 20)
    write(folder / "tiny", [2] * 3)
    write(folder / "2020", [50] * 20)
    Path(folder / "link.bin").symlink_to(folder / "a.bin")
    Path(folder / "link.idx").symlink_to(folder / "a.idx")
    for end in (".bin", ".idx"):
        shutil.copy(folder / f"a{end}", folder / f"copy{end}")
    (folder / "list").write_text("3 a 7 b\n")
    splits = {"train": [3, "a", "7", "b"], "valid": "tiny", "test": None}
    (folder / "splits.json").write_text(json.dumps(splits))
    (folder / "half.json").write_text(json.dumps({"train": "a"}))
    (folder / "talk.jsonl").write_text('{"messages": []}\n')
    write(folder / "cut", [40] * 30)
    os.truncate(folder / "cut.bin", 100)
    write(folder / "short", [40] * 30)
    os.truncate(folder / "short.idx", 200)
    write(folder / "zeros", [0] * 20_000)
    (folder / "no.idx").write_bytes(b"x" * 100)
    (folder / "no.bin").write_bytes(b"")
    os.mkfifo(folder / "pipe")
    return folder


def problem(
    sets: Path, text: str, monkeypatch: pytest.MonkeyPatch, rows: dict[str, int] | None = None
) -> str:
    """What is said about a command line in the folder of the data sets; "" for nothing."""
    monkeypatch.chdir(sets)
    words = text.split()
    words += [word for pair in RUN.items() if pair[0] not in words for word in pair]
    try:
        data_check.require(words, rows)
    except ValueError as found:
        return str(found)
    return ""


@pytest.mark.parametrize(
    "text",
    [
        "--data-path a --split 90,10,0",
        "--data-path a --split 100,0,0 --eval-iters 0",
        "--data-path a b --split 90,10,0",
        "--data-path 0.3 a 0.7 b --split 90,10,0 --train-iters 100000",
        "--data-path a b --split 90,10,0 --train-iters 100000 --dataloader-type cyclic",
        "--data-args-path list --split 90,10,0",
        "--train-data-path 3 a 7 b --valid-data-path 2020",
        "--per-split-data-args-path splits.json --seq-length 3",
        "--data-path ./2020 a --split 90,10,0",
        "--data-path 2020 a --split 100 --omni-encoders x",
        "--data-path s3://bucket/a --split 99,1,0",
        "--data-args-path msc://bucket/list --split 99,1,0",
        "--data-path data/*.jsonl --sft",
        "--data-path a b --split 90,10,0 --train-iters 100 --exit-interval 5",
        "--data-path a --split 90,10,0 --wandb-exp-name two\nlines",
        "--data-path talk.jsonl",  # of a script that reads other files
        "--data-path talk.jsonl --sft --split 100,0,0 --eval-iters 0",
        "--mock-data --split 0,1,0",
        "--lr 1",
    ],
)
def test_what_megatron_reads_is_accepted(sets: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problem(sets, text, monkeypatch) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "--data-path 1 a 2 tiny --split 100",
            "3 documents of tiny, 6 tokens, and a sample takes 9: the same",
        ),
        (
            "--data-path b --split 95,5,0",
            "1 of the 20 documents of b, 7 tokens, and a sample takes 9: the same",
        ),
        ("--train-data-path a --valid-data-path tiny", "gives validation 3 of the 3 documents"),
    ],
)
def test_text_that_repeats_is_named(
    sets: Path, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron trains on a set that is shorter than a sample, unless it reads each set once."""
    monkeypatch.chdir(sets)
    words = text.split()
    words += [word for pair in RUN.items() if pair[0] not in words for word in pair]
    (warning,) = data_check.require(words)
    assert expected in warning


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--data-path a tiny --split 100", "3 documents of tiny, 6 tokens, and a sample takes 9: use"),
        ("--data-path a --split 99,1,0", "validation none of the 30 documents of a, and Megatron would hang"),
        ("--data-path a", "--split 969, 30, 1 gives test none of the 30 documents"),
        ("--data-path a --split 99,1,0 --eval-iters 0", "gives validation none of the 30"),
        ("--data-path a --split 0,100,0", "leaves nothing to train on"),
        ("--valid-data-path a", "--valid-data-path leaves nothing to train on"),
        ("--data-path a b --split 90,10,0 --train-iters 100", "run takes 200: give weights, more data or at"),
        ("--data-path a b --split 90,10,0 --eval-iters 9", "15 samples for validation, and the run takes 54"),
        ("--train-data-path a b --train-samples 900", "166 samples for training, and the run takes 900"),
        ("--data-path a --split 100 --train-samples 1", "1 is less than --global-batch-size 2"),
        ("--data-path a b --split 90,10,0 --eval-iters 0", "the run takes no validation sample"),
        ("--data-path 2 a --split 90,10,0 --eval-iters 0", "the run takes no validation sample"),
        ("--data-path nan a 1 b --split 100", "weight nan of a: give a finite number above 0"),
        ("--data-path 1e999 a 1 b --split 100", "weight 1e999 of a: give a finite"),
        ("--data-path -1 a 1 b --split 100", "weight -1 of a: give a finite"),
        ("--data-path 0 a 1 b --split 100", "weight 0 of a: give a finite"),
        ("--data-path 0.5 a b --split 100", "0.5 is no data set, and not the weight of one"),
        ("--data-path 0.5 a b 0.5 --split 100", "b stands where a weight is expected"),
        ("--data-path a 0.5 b 0.5 --split 100", "0.5 is no data set"),
        ("--data-path 2020 a --split 100", "reads 2020 as the weight of a, and it is a data set, too"),
        ("--data-path --split 100", "names no data set"),
        ("--data-path 0.3 a 0.7 link --split 100", "give it once, with weight 1"),
        ("--data-path a ./a --split 100", "a and ./a are one data set"),
        ("--data-path a b copy --split 100", "a and copy are one data set"),
        ("--train-data-path a copy", "one data set"),
        ("--data-path talk.jsonl ./talk.jsonl --sft", "one data set"),
        ("--data-path missing --split 100", "there is no file missing.bin"),
        ("--data-path a.bin --split 100", "there is no file a.bin.bin"),
        ("--data-path missing.jsonl --sft", "there is no file missing.jsonl"),
        ("--data-args-path missing --split 100", "missing: No such file or directory"),
        ("--data-args-path pipe --split 100", "it is a pipe"),
        ("--data-args-path list", "--data-args-path needs --split"),
        ("--per-split-data-args-path half.json", "give an object with train, valid and test"),
        ("--per-split-data-args-path list", "not JSON"),
        ("--train-data-path a --split 100", "drop --split"),
        ("--data-path a --train-data-path b", "--data-path and --train-data-path both say"),
        ("--data-path a --per-split-data-args-path splits.json", "both say"),
        ("--data-path a --mock-data", "--data-path and --mock-data both say"),
        ("--data-path 1 a --split 90,10,0 --full-validation", "--full-validation reads each set once"),
        ("--data-path a --split 1e2,1", "--split 1e2,1: give up to three weights"),
        ("--data-path a --split -5,1", "give up to three weights"),
        ("--data-path a --split 1,1,1,1", "give up to three weights"),
        ("--data-path cut --split 100", "its index describes 2,400 bytes, and it has 100"),
        ("--data-path short --split 100", "short.idx: it is cut"),
        ("--data-path zeros --split 100", "sequences 0 to 16383 have no tokens"),
        ("--data-path no --split 100", "not the index of a Megatron data set"),
    ],
)  # fmt: skip
def test_what_megatron_would_not_read_is_refused(
    sets: Path, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert expected in problem(sets, text, monkeypatch)


def test_conversations_are_counted_in_rows(sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sets)
    (sets / "more.jsonl").write_text('{"messages": [1]}\n')
    both = {"talk.jsonl": 10, "more.jsonl": 30}
    text = "--sft --split 90,10,0 --data-path talk.jsonl"
    assert problem(sets, text, monkeypatch, both) == ""
    assert "none of the 4 rows" in problem(sets, text, monkeypatch, {"talk.jsonl": 4})
    assert problem(sets, f"{text} more.jsonl --eval-iters 0 --split 100", monkeypatch, both) == ""
    said = problem(sets, f"{text} more.jsonl --train-iters 50", monkeypatch, both)
    assert "reads once: 36 samples for training, and the run takes 100: give weights" in said


class Tokenizer:
    vocab_size, eod, pad, eos = 300, 0, 1, 0
    unique_identifiers = {"name": "test"}


def test_the_counts_are_those_of_megatrons_builder(tmp_path: Path) -> None:
    """One pass over random data sets, alone and blended, and the words paired with weights."""
    pytest.importorskip("megatron.core.datasets")
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    draw = random.Random(7)
    compared = 0
    for case in range(24):
        length = draw.randint(2, 30)
        prefixes = [
            write(tmp_path / f"{case}-{i}", [draw.randint(0, 40) for _ in range(draw.randint(5, 90))])
            for i in range(draw.randint(1, 3))
        ]
        split = ",".join(str(round(draw.random() * 9, draw.randint(0, 3))) for _ in range(draw.randint(1, 3)))
        words = [word for prefix in prefixes for word in (str(draw.random()), prefix)]
        if case % 2:
            words = words[1::2]
        try:
            (blend,) = data_sets.blends({"--data-path": tuple(words), "--split": (split,)})
        except ValueError:
            continue  # three weights of 0
        paired = get_blend_from_list(words)
        assert (list(blend.prefixes), blend.weights and list(blend.weights)) == (paired[0], paired[1])
        parts = [data_sets.parts_of(prefix, blend.bounds, [10**9] * 3) for prefix in prefixes]
        if any(part is not None and not part.samples(length) for of_set in parts for part in of_set):
            continue  # Megatron would hang at some of these
        config: Any = GPTDatasetConfig(
            random_seed=1,
            sequence_length=length,
            blend=(paired[0], None),
            split=split,
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            path_to_cache=str(tmp_path / "cache"),
        )
        built = BlendedMegatronDatasetBuilder(GPTDataset, [None] * 3, lambda: True, config).build()
        ours = [
            None if of_split[0] is None else sum(part.samples(length) for part in of_split)
            for of_split in zip(*parts, strict=True)
        ]
        assert ours == [None if one is None else len(one) for one in built], (split, length)
        if len(prefixes) == 1:
            documents = [None if part is None else part.documents for part in parts[0]]
            assert documents == [None if one is None else len(one.indices) for one in built]
        compared += 1
    assert compared > 8


def test_a_changed_index_is_refused_or_read(tmp_path: Path) -> None:
    prefix = write(tmp_path / "set", [40] * 30)
    index = (tmp_path / "set.idx").read_bytes()
    draw, refused = random.Random(3), 0
    for _ in range(300):
        changed = bytearray(index[: draw.choice((len(index), draw.randrange(len(index))))])
        for _ in range(draw.randint(0, 3) if changed else 0):
            changed[draw.randrange(min(len(changed), 60))] = draw.randrange(256)
        (tmp_path / "set.idx").write_bytes(changed)
        try:
            data_sets.parts_of(prefix, data_sets.split_bounds("8,1,1"), [9, 9, 9])
        except ValueError as problem:
            assert str(problem).startswith(prefix)
            refused += 1
    assert 100 < refused < 300


def test_explain_names_what_this_machine_shows(sets: Path) -> None:
    def explained(text: str) -> list[str]:
        found = explain_command(get("nano"), f"python pretrain_hybrid.py --seq-length 8 {text}")
        return [violation.message for violation in found.violations if violation.rule == "data"]

    (said,) = explained(f"--data-path {sets}/a --split 99,1,0")
    assert "gives validation none of the 30 documents" in said
    assert explained("--data-path /elsewhere/a --split 99,1,0") == []
    assert explained("--data-args-path /elsewhere/list --split 99,1,0") == []
    assert explained("--data-path $DATA --split 99,1,0") == []
    assert explained(f"--data-path {sets}/a --split $SPLIT") == []
    assert "weight -1" in explained("--data-path -1 /elsewhere/a 1 /elsewhere/b --split 99,1,0")[0]


def test_run_refuses_before_anything_starts(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, save = tmp_path / "pretrain.py", tmp_path / "save"
    script.write_text("raise AssertionError\n")
    words = [str(script), "--save", str(save), "--data-path", f"{sets}/a", "--split", "99,1,0"]
    with pytest.raises(SystemExit) as ended:
        run.main(words)
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("megatron_nemotron3.run: --split 99,1,0 gives validation none of the 30 documents")
    assert not save.exists()
    # Of the ranks of a node one looks.
    monkeypatch.setenv("LOCAL_RANK", "1")
    run_checks.require_data(words)


def test_train_refuses_before_anything_is_written(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(SMALLEST)
    words = ["train", "nano", "--tiny", "--device", "cpu", "--tokenizer", str(tmp_path / "tokenizer")]
    words += ["--seq-length", "8", "--steps", "4", "--output", str(tmp_path / "run"), "--data-path"]
    for data, expected in (
        (["-1", f"{sets}/a", "2", f"{sets}/b"], "weight -1 of"),
        ([f"{sets}/a", f"{sets}/link"], "are one data set"),
        ([f"{sets}/b"], "gives validation none of the 20 documents"),
    ):
        assert cli.main([*words, *data]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("nemotron3 train: ") and expected in said
        assert not (tmp_path / "run").exists()


def talks(folder: Path, name: str, lines: int) -> None:
    folder.joinpath(name).write_text('{"messages": []}\n\n' * lines)


#: Options with which the script of this package packs conversations.
PACKED = "--sft --calculate-per-token-loss --sft-tokenizer-prompt-format default"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("--sft --data-path ten --split 90,10,0", ""),
        ("--sft --data-path ten --split 100 --eval-iters 0", ""),
        ("--sft --data-path ten --eval-iters 0", ""),
        (
            "--sft --data-path ten",
            "gives validation none of the 10 rows of ten, and Megatron would end at",
        ),
        ("--sft --data-path 1 ten 2 empty --split 90,10,0", "empty has no conversation"),
        (f"{PACKED} --data-path empty --split 90,10,0", "empty has no conversation"),
        (f"{PACKED} --data-path ten", ""),
        (f"{PACKED} --data-path ten three --split 60,30,10", ""),
        ("--sft --data-path ten three --split 60,40,0", "2 files of conversations without weights"),
        ("--sft --data-path array --split 100,0,0", ""),
        ("--train-data-path a b --train-iters 82 --rampup-batch-size 1 1 9", ""),
        ("--data-path a b --split 90,10,0 --train-iters 100 --rampup-batch-size 1 1 9", "run takes 200"),
        ("--train-data-path a --phase-transition-iterations 5", "without --train-samples"),
        (
            "--train-data-path a b --train-samples 900 --phase-transition-iterations 200",
            "166 samples for training, and the run takes 400",
        ),
        ("--train-data-path a b --train-samples 900 --phase-transition-iterations 50,300", ""),
        ("--train-data-path a b --step-batch-size-schedule 0:1", "both say the batch"),
    ],
)
def test_rows_and_samples_of_a_schedule(
    sets: Path, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks(sets, "ten", 10)
    talks(sets, "three", 3)
    (sets / "empty").write_text("\n \n")
    (sets / "array").write_text('[{"messages": []}]')
    said = problem(sets, text, monkeypatch)
    assert expected in said if expected else not said


def test_rows_that_repeat(sets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Within a step a warning, over the epochs of a run a line of explain."""
    monkeypatch.chdir(tmp_path)
    talks(tmp_path, "ten", 10)
    text = "--sft --data-path ten --split 100,0,0 --seq-length 8 --train-iters 20 --global-batch-size"
    assert data_check.require([*text.split(), "10"]) == []
    (said,) = data_check.require([*text.split(), "11"])
    assert "10 rows for training, and a step takes 11" in said
    # Who packs them knows the number of rows; of our script and words that fit both nothing is said.
    packed = [*PACKED.split(), *text.split()[1:], "11"]
    assert data_check.require(packed) == data_check.require(packed, script="x/pretrain_script.py") == []
    assert data_check.require(packed, script="x/pretrain_hybrid.py") == [said]
    assert "4 rows for training" in data_check.require(packed, {"ten": 4})[0]
    found = explain_command(get("nano"), f"python pretrain_hybrid.py {text} 4")
    (note,) = [str(violation) for violation in found.violations if violation.rule == "data"]
    assert "of 80 samples for training 80 come from the 10 rows of ten: 8 epochs" in note


def test_lines_are_counted_in_bounded_memory(tmp_path: Path) -> None:
    file = tmp_path / "talk"
    file.write_bytes(b"\n" + b"{" + b" " * (3 << 20) + b"}\n\n{}\n" + b"{}")
    assert data_sets.conversations_in(str(file)) == 3
    file.write_bytes(b"\x1f\x8b" + b"{}\n")
    assert data_sets.conversations_in(str(file)) is None
    os.truncate(file, (1 << 30) + 1)
    assert data_sets.conversations_in(str(file)) is None


def test_samples_are_those_of_megatrons_calculator() -> None:
    module = pytest.importorskip("megatron.core.num_microbatches_calculator")
    draw = random.Random(11)
    for _ in range(60):
        length, entries = draw.choice((1, 7, 4096)), draw.randint(1, 4)
        starts = [0, *sorted(draw.sample(range(1, 400), entries - 1))]
        words = [f"{start * length}:{draw.randint(1, 40)}" for start in starts]
        draw.shuffle(words)
        text = draw.choice((" ", ",")).join(words)
        theirs = module.StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, length)
        ours = schedule.BatchSizes.read(text, length)
        assert list(ours.sizes) == theirs.schedule
        end, taken, done = draw.randint(0, 700), 0, 0
        while taken < end:  # megatron.training.training.update_train_iters
            theirs.update(taken, False)
            taken += theirs.get_current_global_batch_size()
            done += 1
        assert ours.taken(samples=end) == (done, taken)
        assert ours.taken(steps=done) == (done, taken)
    assert schedule.BatchSizes.read("0:768 0.25K:1536,1m:2", 10).sizes == ((0, 768), (25, 1536), (100_000, 2))
    # A ramp changes nothing in it.
    module.unset_num_microbatches_calculator()
    module.init_num_microbatches_calculator(1, [1, 1, 9], 4, 1, 1)
    try:
        for consumed in (0, 4, 100):
            module.update_num_microbatches(consumed)
            assert module.get_current_global_batch_size() == 4
    finally:
        module.unset_num_microbatches_calculator()
    for wrong in ("0:0", "10:4", "0:4 3:8 5:9", "0", "0:nan", "0:1e400", "x:4"):
        with pytest.raises(ValueError, match="--step-batch-size-schedule"):
            schedule.BatchSizes.read(wrong, 10)


def test_rows_are_those_of_megatrons_conversations(tmp_path: Path) -> None:
    """Its builder has as many rows in each part, cannot count sets without weights, and fails at none."""
    sft = pytest.importorskip("megatron.training.datasets.sft_dataset")
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    class Rows(sft.SFTDataset):  # type: ignore[misc, name-defined]
        @staticmethod
        def build_low_level_dataset(dataset_path: str, config: Any) -> list[Any]:
            return [json.loads(line)["messages"] for line in open(dataset_path) if line.strip()]

    def built(files: list[str], weights: list[float] | None, split: str) -> Any:
        config: Any = GPTDatasetConfig(
            random_seed=1,
            sequence_length=8,
            blend=(files, weights),
            split=split,
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        return BlendedMegatronDatasetBuilder(Rows, [20, 4, 4], lambda: True, config).build()

    for lines in (3, 10, 31):
        talks(tmp_path, "some", lines)
        file = str(tmp_path / "some")
        assert data_sets.conversations_in(file) == lines
        for split in ("969,30,1", "90,10,0", "60,30,10"):
            sets = built([file], None, split)
            cuts = [data_sets.cut(bounds, lines) for bounds in data_sets.split_bounds(split)]
            assert [s and len(s.indices) for s in sets] == [c if c is None else len(c) for c in cuts]
            for part in sets:
                if part is not None and not len(part.indices):
                    with pytest.raises(ZeroDivisionError):
                        part[0]
    talks(tmp_path, "more", 30)
    with pytest.raises(AssertionError):
        built([file, str(tmp_path / "more")], None, "90,10,0")


@pytest.mark.parametrize(("seconds", "outdated"), [(0, False), (-3600, True), (9e8, False)])
@pytest.mark.parametrize("given", [False, True])
def test_an_index_from_before_a_change(
    seconds: float, outdated: bool, given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron finds it by the path of the data set. A data set of the future cannot be judged."""
    prefix = write(tmp_path / "a", [40] * 30)
    folder = tmp_path / "cache" if given else tmp_path / "a" / "cache" / "GPTDataset_indices"
    folder.mkdir(parents=True)
    (folder / "0-GPTDataset-train-description.txt").write_text(f'{{\n    "dataset_path": "{prefix}",\n}}')
    (folder / "1-GPTDataset-train-description.txt").write_text('{"dataset_path": "b"}')
    now = os.stat(f"{prefix}.idx").st_mtime
    for file in folder.iterdir():
        os.utime(file, (now + min(seconds, 0), now + min(seconds, 0)))
    if seconds > 0:
        os.utime(f"{prefix}.idx", (now + seconds, now + seconds))
    words = f"--data-path {prefix} --split 80,10,10" + f" --data-cache-path {folder}" * given
    said = problem(tmp_path, words, monkeypatch)
    assert said == "" or said.endswith(f"by the old index: remove {folder}")
    assert bool(said) == outdated


def test_an_index_without_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of another user; a folder of indices that is there may have the right one."""
    prefix, words = write(tmp_path / "a", [40] * 30), f"--data-path {tmp_path / 'a'} --split 80,10,10"
    monkeypatch.setattr(data_check, "not_writable", lambda path: tmp_path)
    said = (
        f"index of the samples to {prefix}/cache, and {tmp_path} is not writable: give --data-cache-path DIR"
    )
    assert problem(tmp_path, words, monkeypatch).endswith(said)
    assert problem(tmp_path, f"{words} --data-cache-path {tmp_path}", monkeypatch) == ""
    monkeypatch.setattr(inputs, "not_writable", lambda path: tmp_path)
    options = inputs.TrainOptions(data_path=[prefix], tokenizer="t")
    assert inputs.named_data(options, tmp_path / "run", None).data_cache_path == f"{tmp_path}/run/data/cache"
    Path(prefix, "cache").mkdir(parents=True)
    assert problem(tmp_path, words, monkeypatch) == ""
