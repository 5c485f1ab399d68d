"""The scripts of benchmarks/ run and print their tables. No figure is judged by its size."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import warnings
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_model, gpu_weights
from benchmarks.gpu_world import host_waits, world
from megatron_nemotron3.cpu import cpu_mode
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models.parameters import count
from tests.support.model_mapping import megatron_model, to_transformers, transformers_config
from tests.support.programs import run_python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
#: Files that are run; the others are imported by them.
SCRIPTS = sorted(p.name for p in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__"' in p.read_text())
TINY_GPU = ("--device", "cpu", "--tiny", "--rounds", "1", "--steps", "1")


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark in a process forked with Megatron imported."""
    return run_python([str(BENCHMARKS / script), *arguments], Path.cwd(), timeout=900, **environment)


def tables(output: str) -> list[list[list[str]]]:
    """The Markdown tables of an output: their rows, the header first, the rule left out."""
    found: list[list[list[str]]] = [[]]
    for line in output.splitlines():
        if re.fullmatch(r"\|[-:|]+\|", line):
            continue
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [rows for rows in found if rows]


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def test_padded_packs_against_packs_without_padding() -> None:
    done = run("train_step.py", "--packed", "--lengths", "64", "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    ((_, row),) = tables(done.stdout)
    assert row[0] == "64" and all(number(cell) > 0 for cell in row[1:])


def test_parts_of_a_step() -> None:
    done = run("parts.py", "--lengths", "64", "--repetitions", "1")
    assert done.returncode == 0, done.stderr
    ((header, *rows),) = tables(done.stdout)
    milliseconds = {row[0]: number(row[1]) for row in rows}
    assert header[1] == "64 tokens"
    assert {"scan", "convolution", "norms", "experts", "dense products", "attention"} < set(milliseconds)
    assert milliseconds["whole step"] >= milliseconds["scan"] > 0


def test_every_script_is_known() -> None:
    assert {"memory.py", "ssd.py", "train_step.py", "train_step_gpu.py"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage:")


@dataclass(frozen=True)
class Case:
    script: str
    options: tuple[str, ...]
    #: Of the table, header included.
    first_column: tuple[str, ...]
    #: A column of figures above zero.
    figures: str


ONE_LENGTH = ("--lengths", "64", "--repetitions", "1")
SMALL = {
    "ours": Case("train_step.py", ("--ours-only", *ONE_LENGTH), ("tokens", "64"), "ours tok/s"),
    "converter": Case(
        "convert.py",
        ("--quick", "--gigabytes", "0.06", "--workers", "1", "--without-transformers"),
        ("side", "cp hf", "cp megatron", "from-hf, 1 worker", "to-hf, 1 worker"),
        "warm MB/s",
    ),
}
LARGER = {
    "whole model": Case("train_step.py", ONE_LENGTH, ("tokens", "64"), "HF tok/s"),
    "scan": Case(
        "ssd.py", ("--quick", "--repetitions", "1"), ("tokens", *3 * ["512"], *3 * ["2048"]), "tok/s"
    ),
    "memory": Case("memory.py", ("--quick",), ("kind", "M", "*", "E", "-"), "2048 MiB"),
    "convert": Case(
        "convert.py",
        ("--quick", "--gigabytes", "0.06", "--workers", "2"),
        (
            *("side", "cp hf", "cp megatron", "from-hf, 1 worker", "to-hf, 1 worker"),
            *("from-hf, 2 workers", "to-hf, 2 workers", "save_pretrained"),
        ),
        "warm MB/s",
    ),
    "nvfp4": Case(
        "nvfp4.py",
        ("--tiny", "--rounds", "1", "--tokens", "32"),
        ("side", "plain", "torch", "Triton"),
        "ms",
    ),
    "one device of a boundary": Case(
        "boundary.py", ("--device", "cpu", "--rounds", "1"), ("pieces", "1", "16", "256"), "MiB"
    ),
    "plans": Case("convert_shapes.py", ("--models", "nano"), ("model", "nano", "nano"), "RSS MiB"),
}


@pytest.mark.parametrize("case", [*SMALL, *(pytest.param(name, marks=pytest.mark.full) for name in LARGER)])
def test_table_is_printed(case: str) -> None:
    expected = (SMALL | LARGER)[case]
    done = run(expected.script, *expected.options)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    header, *rows = tables(done.stdout)[0]
    assert (header[0], *(row[0] for row in rows)) == expected.first_column
    assert all(number(row[header.index(expected.figures)]) > 0 for row in rows)


# --- train_step_gpu.py --------------------------------------------------------------------------------


def check_gpu_table(rows: list[list[str]], sides: list[str]) -> None:
    header = rows[0]
    assert header == ["side", "tok/s", "ms", "MFU %", "peak GiB", "waits", "loss", "logits", "tok/s ratio"]
    assert [row[0] for row in rows[1:]] == sides
    for row in (dict(zip(header, row, strict=True)) for row in rows[1:]):
        assert number(row["tok/s"]) > 0 and number(row["peak GiB"]) > 0
        assert number(row["waits"]) >= 0 and 7 < number(row["loss"]) < 9  # 2,048 tokens: ln is 7.6
        assert number(row["logits"]) <= 4 * 2.0**-7


@pytest.mark.full
def test_gpu_script_runs_on_the_cpu() -> None:
    done = run("train_step_gpu.py", *TINY_GPU, "--widths", "super", "--sides", "ours-kernels")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (rows,) = tables(done.stdout)
    check_gpu_table(rows, ["ours-kernels"])


@pytest.mark.full
def test_gpu_script_compares_every_side_on_the_cpu() -> None:
    done = run("train_step_gpu.py", *TINY_GPU, "--profile", "3")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for_nano, for_super = tables(done.stdout)[:2]
    for rows in (for_nano, for_super):
        check_gpu_table(rows, ["ours-kernels", "ours-plain", "hf-grouped_mm", "hf-eager", "hf-batched_mm"])
    assert len(re.findall(r"^- stock-te: \w+Error: .*(?:transformer-engine|GPU)", done.stdout, re.M)) == 2
    assert "Self CPU" in done.stdout


@pytest.mark.parametrize(
    "options, message", [((), "no CUDA device here"), (("--device", "cpu"), "add --tiny")]
)
def test_gpu_script_says_what_it_needs(options: tuple[str, ...], message: str) -> None:
    done = run("train_step_gpu.py", *options, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert message in done.stderr and not done.stdout


def test_waits_on_cuda_are_warnings_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counting of what CUDA reports, with reports made here; everything is put back."""
    modes: list[str] = []

    def one_step() -> None:
        for _ in range(3):  # the same line three times: all count
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        torch.cuda.Event().synchronize()
        torch.cuda.synchronize()

    with cpu_mode():
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
        before = torch.cuda.Event.synchronize, torch.cuda.synchronize
        assert host_waits(one_step, "cuda") == 5
        assert modes == ["warn", "default"]
        assert (torch.cuda.Event.synchronize, torch.cuda.synchronize) == before


def test_gpu_side_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a GPU's side with `cpu_mode` in CUDA's place: build, logits, a turn, memory given back."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("NEMOTRON3_GPU_KERNELS", "0")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    sides = importlib.import_module("gpu_sides")
    stride = importlib.import_module("gpu_side").VOCABULARY_STRIDE
    config = gpu_model.stack("super", tiny=True).but(pattern="ME*")
    with cpu_mode(), warnings.catch_warnings():
        side = sides.SIDES["ours-plain"]("cuda")
        try:
            settings = side.build(config)
            logits = side.logits(64)
            figures = side.measure(64, 3)
        finally:
            side.close()
        wide = 2 * config.mamba_num_heads  # A_log and D are FP32
        assert settings.startswith("backend torch")
        assert logits.shape == (64, config.vocab_size // stride)
        assert len(figures["seconds"]) == 3 and min(figures["seconds"]) > 0
        assert figures["weights"] == 2 * count(config).trainable + 2 * wide
        assert all(p.untyped_storage().nbytes() == 0 for p in side.module.parameters())


def test_stacks_keep_the_published_proportions() -> None:
    """Nano: 23 M, 23 E, 6 *; Super: 40, 40, 8."""
    assert gpu_model.stack("nano").pattern == "MEMEM*EME"
    assert gpu_model.stack("super").pattern == "MEMEMEM*EME"
    for name in ("nano", "super"):
        config, published = gpu_model.stack(name), get(name)
        assert config.but(pattern=published.pattern) == published.but(mtp_pattern=None, mtp_num_layers=0)


def test_experts_are_halved_until_they_fit() -> None:
    """On an H200 none are; on 80 GB half of Super's."""
    config = gpu_model.stack("super")
    assert gpu_model.fitting(config, 139 * 2**30) is config
    assert gpu_model.fitting(config, 80 * 10**9).num_moe_experts == 256
    with pytest.raises(ValueError, match="Super 120B-A12B with 64 experts needs .* use a larger device"):
        gpu_model.fitting(config, 44 * 2**30)


#: What Megatron's function asks of a layer kind that this family does not have.
LINEAR_ATTENTION = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim")


@pytest.mark.parametrize("tokens", [512, 8192])
def test_flops_are_megatrons(tokens: int) -> None:
    """Megatron leaves out the router; for Super all else is the same."""
    from megatron.training.training import num_floating_point_operations

    config = gpu_model.stack("super")
    args = Namespace(
        **{name: getattr(config, name) for name in dir(config) if not name.startswith("_")},
        group_query_attention=True,
        hybrid_layer_pattern=config.pattern,
        padded_vocab_size=config.vocab_size,
        swiglu=False,
        **dict.fromkeys(f"linear_{name}" for name in LINEAR_ATTENTION),
    )
    args.seq_length, args.mtp_num_layers = tokens, 0
    router = 6 * config.pattern.count("E") * value(config.num_moe_experts) * config.hidden_size
    ours = sum(gpu_model.flops_per_token(config, tokens).values())
    assert ours - router == pytest.approx(num_floating_point_operations(args, 1) / tokens, rel=1e-12)


def value(n: int | None) -> int:
    assert n is not None
    return n


def test_matmul_flops_are_six_a_parameter() -> None:
    """Without embedding, norms, convolution and the scan's vectors, less than 1 % of Super."""
    active = count(gpu_model.stack("super")).active["with_output_layer"]
    matmul = gpu_model.flops_per_token(gpu_model.stack("super"), 8192)["matmul"]
    assert 0.99 * active < matmul / 6 < active


@pytest.mark.parametrize("name", ["nano", "super"])
@pytest.mark.parametrize("pinned", [False, True])
def test_sides_hold_the_same_weights(name: str, pinned: bool) -> None:
    """Filled by name, converted by the parity tests' own table; also after the memory was given back."""
    transformers = pytest.importorskip("transformers")
    config: Nemotron3Config = gpu_model.stack(name, tiny=True)
    theirs = transformers.NemotronHForCausalLM(transformers_config(config))
    gpu_weights.fill(gpu_weights.transformers_pieces(theirs, config), pinned=pinned)
    expected = theirs.state_dict()
    with world("cpu"):
        ours = megatron_model(config)
    storages = gpu_weights.Storages(ours)
    assert storages.nbytes == sum(p.nbytes for p in ours.parameters())
    for _ in range(2):
        gpu_weights.fill(gpu_weights.megatron_pieces(ours, config), pinned=pinned)
        found = to_transformers({n: t for n, t in ours.state_dict().items() if t is not None}, config)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[n], t) for n, t in expected.items())
        assert all(t.std() > 0 for n, t in found.items() if pinned or not n.endswith("correction_bias"))
        storages.release()
        assert all(p.untyped_storage().nbytes() == 0 for p in ours.parameters())
        storages.allocate()


@pytest.mark.full
def test_boundary_reaches_its_bound() -> None:
    # Not forked: its ranks send objects of its own classes, which pickle finds in a real `__main__` only.
    words = [sys.executable, str(BENCHMARKS / "boundary.py"), "--quick"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    ((header, *rows),) = tables(done.stdout)
    assert len(rows) == 18  # both ways of nine cases
    column = header.index("ours")
    for row in rows:
        assert number(row[column]) == number(row[header.index("bound")]) and "ok" in row
