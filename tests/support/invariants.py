"""Measures what must not change while modules move, for test_invariants.py.

Everything is reached as users reach it: the command line, the facade, `megatron_nemotron3.specs`, `.run` and
`.bridge`, and files on disk. So nothing here needs an edit when modules move. Each function of `MEASURED`
returns what golden/invariants has under its name, and golden/make_invariants.py writes it there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import inspect
import io
import json
import re
import shlex
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable
from difflib import unified_diff
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.cli.table import COMMANDS

ROOT = Path(__file__).parents[2]
ORACLES = ROOT / "tests" / "golden"
GOLDEN = ORACLES / "invariants"
PACKAGE = ROOT / "megatron_nemotron3"
#: The model of the numbers: every kind of layer but dense ones, latent experts, and MTP that repeats a block.
MODEL = "super-tiny"
#: Models whose parameters and checkpoint keys are kept: also dense layers, and experts by layer.
MODELS = (MODEL, "nano-4b-tiny", "puzzle-tiny")

#: Linears whose codes in training are kept: one that the recipe leaves in MXFP8, two in NVFP4.
LINEARS = ("0.mixer.out_proj", "1.mlp.shared_experts.linear_fc1", "1.mlp.shared_experts.linear_fc2")
FLAGS = (
    "",
    "--tp 2 --pp 2 --cp 2 --dp 2",
    "--tp 2 --ep 4 --etp 1 --dp 2 --precision mxfp8 --gpu gb200",
    "--pp 2 --vpp 2 --schedule published --gpu h100",
    "--tiny --precision fp32 --backend torch --steps 100 --seq-length 256 --micro-batch-size 2 --lr 1e-4",
)
PLANS = (
    "nano --gpus 16 --gpu h100 --best 2",
    "super --gpus 512 --gpu gb200 --precision nvfp4 --best 1",
    "nemotron-h-8b --gpus 32 --gpu b200 --precision fp8-tensorwise --seq-length 16384 --plain --best 1",
)


def nemotron3(line: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of `nemotron3 LINE`: the console script's function, in this process."""
    main: Callable[[], int] = importlib.import_module("megatron_nemotron3.__main__").main
    argv, interrupt = sys.argv, signal.getsignal(signal.SIGINT)
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["nemotron3", *shlex.split(line)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main()
            except SystemExit as end:
                status = int(end.code or 0)
    finally:
        sys.argv = argv
        signal.signal(signal.SIGINT, interrupt)
    return status, out.getvalue(), err.getvalue()


def printed(line: str) -> str:
    """What a command that succeeds prints."""
    status, out, err = nemotron3(line)
    assert status == 0, f"nemotron3 {line}: {err}"
    return out


class _Asked(BaseException):
    """Carries the parser that a command line would be parsed with."""


def _parser(line: str) -> argparse.ArgumentParser:
    """The parser that argparse is asked to use for a command line."""

    def take(self: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        raise _Asked(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", take)
        try:
            nemotron3(line)
        except _Asked as asked:
            parser: argparse.ArgumentParser = asked.args[0]
            return parser
    raise AssertionError(f"nemotron3 {line} did not parse its words")


def _described(action: argparse.Action) -> str:
    """All that a user may rely on: spellings, number of values, type, choices, default."""
    spelled = " ".join(action.option_strings) or f"<{action.dest}>"
    kind = getattr(action.type, "__name__", None) or (action.type and type(action.type).__name__)
    values = {
        "dest": action.dest if action.option_strings else None,
        "metavar": action.metavar,
        "nargs": action.nargs,
        "type": kind,
        "choices": None if action.choices is None else [str(choice) for choice in action.choices],
        "const": action.const,
        "default": action.default,
        "required": action.required or None,
        "hidden": action.help == argparse.SUPPRESS or None,
    }
    return "  ".join([spelled, *(f"{k}={value}" for k, value in values.items() if value is not None)])


def options_of(name: str) -> list[argparse.Action]:
    """Options and positional arguments of a command."""
    parser = _parser(name)
    for word in name.split():
        (action,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
        parser = action.choices[word]
    return [one for one in parser._actions if not isinstance(one, argparse._SubParsersAction)]


def commands() -> dict[str, list[str]]:
    """Every command with its options and positional arguments."""
    top = _parser("")
    found = {"nemotron3": sorted(_described(a) for a in top._actions if a.option_strings)}
    for name in COMMANDS:
        found[name] = sorted(map(_described, options_of(name)))
    return dict(sorted(found.items()))


def variables() -> list[str]:
    """Names of the environment variables that the package's files and the recipes mention."""
    folders = [PACKAGE, *([ROOT / "recipes"] if (ROOT / "recipes").is_dir() else [])]
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".sh")]
    return sorted({name for f in files for name in re.findall(r"\bNEMOTRON3_[A-Z0-9_]+", f.read_text())})


def flags() -> dict[str, list[str]]:
    """Lines of `nemotron3 flags` for the layouts that a model can have; after the first, what differs."""
    import megatron_nemotron3 as n3

    found = {}
    for name in n3.names():
        plain: list[str] = []
        for words in FLAGS:
            line = f"flags {name} {words} --megatron-core 0.19".replace("  ", " ")
            status, out, _ = nemotron3(line)
            if status == 0:
                lines = out.split("\n")
                found[line] = [*unified_diff(plain, lines, n=0, lineterm="")][2:] if plain else lines
                plain = plain or lines
    for gpu in ("h100", "gb200"):
        line = f"flags super --gpu {gpu} --environment"
        found[line] = printed(line).split("\n")
    return found


def plan() -> dict[str, Any]:
    """`nemotron3 plan --json` for `PLANS`."""
    return {words: json.loads(printed(f"plan {words} --json")) for words in PLANS}


def precision() -> dict[str, list[str]]:
    """The file that `--te-precision-config-file` reads, for published recipes."""
    found = {}
    for name in ("nano", "super", "ultra"):
        with tempfile.TemporaryDirectory() as place:
            printed(f"precision {name} --output {place}/recipe.yaml")
            found[name] = Path(place, "recipe.yaml").read_text().split("\n")
    return found


def _signature(value: Any) -> list[str]:
    """Parameters with their defaults, without types."""
    if not callable(value):
        return []
    parameters = inspect.signature(value).parameters.values()
    shown = (str(one.replace(annotation=inspect.Parameter.empty)) for one in parameters)
    return [one.partition("=<")[0] for one in shown]  # of a function that is a default: its name alone


def facade() -> dict[str, list[str]]:
    """Public names of the package, and the parameters of what can be called."""
    import megatron_nemotron3 as n3

    stacks = [name for name in n3.__all__ if name.endswith("_spec")]
    return {name: [] if name in stacks else _signature(getattr(n3, name)) for name in sorted(n3.__all__)}


def specs() -> list[str]:
    """Targets of `--spec megatron_nemotron3.specs`."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    found = vars(importlib.import_module("megatron_nemotron3.specs"))
    return sorted(name for name, value in found.items() if isinstance(value, ModuleSpec) and "@" not in name)


def oracles() -> dict[str, str]:
    """SHA-256 of the files that record what other systems do, and of the recipes' and launches' commands."""
    files = (file for file in ORACLES.rglob("*") if file.is_file() and GOLDEN not in file.parents)
    kept = (file for file in files if file.suffix not in (".py", ".pyc", ".md"))
    return {f.relative_to(ORACLES).as_posix(): _sha256(f.read_bytes()) for f in sorted(kept)}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _fill(name: str, tensor: Any) -> None:
    """Write values that follow from the name alone: hashed counters, exact in every version of torch."""
    import torch

    count = (torch.arange(tensor.numel(), dtype=torch.int64) + zlib.crc32(name.encode())) & 0xFFFFFFFF
    for factor in (0x45D9F3B, 0x119DE1F3):
        count = ((count ^ (count >> 16)) * factor) & 0xFFFFFFFF
    uniform = ((count ^ (count >> 16)) & 0xFFFFFF).double() / 2**23 - 1  # [-1, 1)
    fan_in = tensor.shape[-1] if tensor.dim() > 1 else 100
    center = 1.0 if "norm" in name or name.endswith((".D", "A_log")) else 0.0
    center = -2.0 if name.endswith("dt_bias") else center
    with torch.no_grad():
        tensor.copy_((center + uniform * (3 / fan_in) ** 0.5).reshape(tensor.shape))


def build(name: str, **settings: Any) -> Any:
    """A model of the catalog in FP32 on plain torch, with the values of `_fill`."""
    import megatron_nemotron3 as n3

    settings = {"precision": "fp32", "backend": "torch", **settings}
    with contextlib.redirect_stdout(io.StringIO()):
        model = n3.build_model(name, **settings)
    buffers = [pair for pair in model.named_buffers() if pair[0].endswith("expert_bias")]
    for parameter, tensor in [*model.named_parameters(), *buffers]:
        _fill(parameter, tensor)
    return model


def save(model: Any, folder: Path) -> Path:
    """The weights as Megatron saves them, without a run's arguments."""
    from megatron.core import dist_checkpointing, parallel_state

    folder.mkdir()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    with contextlib.redirect_stdout(io.StringIO()):
        dist_checkpointing.save(model.sharded_state_dict(metadata={"dp_cp_group": group}), str(folder))
    return folder


def stored(folder: Path) -> dict[str, str]:
    """Tensors of a torch_dist checkpoint, read by torch itself: key -> type, shape, digest."""
    import torch
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    kinds = {key: entry for key, entry in entries.items() if hasattr(entry, "size")}
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in kinds.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    objects = dict.fromkeys(entries.keys() - kinds.keys(), "object")
    return dict(sorted({**{key: _digest(value) for key, value in state.items()}, **objects}.items()))


def _runs(lines: Iterable[str]) -> list[str]:
    """Lines in their order; those that differ only in the number of an expert or shard are one."""
    alike = (re.sub(r"(?<=weight)\d+(?= \[)|(?<=shard_)\d+(?=_)", "#", line) for line in lines)
    return [f"{line}  x{n}" if (n := len([*same])) > 1 else line for line, same in groupby(alike)]


def _digest(tensor: Any) -> str:
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} {_sha256(data)}"


def hf_folder(folder: Path) -> dict[str, Any]:
    """A Hugging Face folder: its configuration files, and every tensor in the order of the files."""
    from safetensors import safe_open

    found: dict[str, Any] = {file.name: file.read_text() for file in sorted(folder.glob("*config.json"))}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.offset_keys():
                found[name] = _digest(opened.get_tensor(name))
    return found


def names_and_keys() -> dict[str, Any]:
    """Parameters in their order with shapes, and torch_dist keys with type, global shape and bytes."""
    found = {}
    for name in MODELS:
        model = build(name)
        with tempfile.TemporaryDirectory() as place:
            keys = stored(save(model, Path(place) / "saved"))
        found[name] = {
            "parameters": _runs(f"{key} {[*value.shape]}" for key, value in model.named_parameters()),
            "torch_dist": _runs(f"{key} {value}" for key, value in keys.items()),
        }
    return found


def conversion() -> dict[str, Any]:
    """Both directions of `nemotron3 convert`, and weights that it packs in NVFP4 and FP8."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        path = Path(place)
        save(build(MODEL), path / "saved")
        printed(f"convert to-hf {path}/saved {path}/hf --model {MODEL} --workers 1")
        found["to-hf"] = hf_folder(path / "hf")
        printed(f"convert from-hf {path}/hf {path}/back --workers 1")
        back = next(path.glob("back/**/.metadata")).parent
        found["from-hf"] = {"torch_dist": stored(back), "arguments": _arguments(back)}
        printed(f"convert to-hf {path}/back {path}/again --workers 1")
        assert hf_folder(path / "again") == found["to-hf"]
        modules = [k[:-7] for k, v in found["to-hf"].items() if k.endswith(".weight") and ", " in v]
        (path / "scales.json").write_text(json.dumps({f"{name}.input_scale": 0.01 for name in modules}))
        for recipe, more in (("super-nvfp4", ""), ("super-fp8", f"--input-scales {path}/scales.json")):
            words = f"{path}/back {path}/{recipe} --quantize {recipe} --dtype bfloat16 --workers 1"
            printed(f"convert to-hf {words} {more}")
            found[recipe] = hf_folder(path / recipe)
    return found


def _arguments(folder: Path) -> dict[str, str]:
    """Megatron's arguments in a checkpoint."""
    import torch

    common = torch.load(folder / "common.pt", weights_only=False)
    return {name: repr(value) for name, value in sorted(vars(common["args"]).items())}


def numbers() -> dict[str, Any]:
    """Logits, losses and gradient norms of a forward and backward pass in FP32."""
    import torch

    model = build(MODEL)
    tokens = (torch.arange(2 * 64).reshape(2, 64) * 37 + 11) % 2048
    positions = torch.arange(64).expand(2, 64)
    with torch.no_grad():
        logits = model(tokens, positions, None)
    losses = model(tokens, positions, None, labels=(tokens * 7 + 3) % 2048)
    losses.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        "logits": logits[:, ::16, ::256].double().tolist(),
        "losses": losses.detach()[:, ::4].double().tolist(),
        "gradient norms": {name: float(one.double().norm()) for name, one in gradients.items()},
    }


def training_codes() -> dict[str, str]:
    """What a linear makes of the unit matrix in emulated formats: its weights as their codes stand for them.

    The sums have one term each, so they are the same on every machine.
    """
    import torch

    found = {}
    with tempfile.TemporaryDirectory() as place:
        printed(f"precision {MODEL} --output {place}/recipe.yaml")
        for name in ("nvfp4", "mxfp8"):
            file = {"te_precision_config_file": f"{place}/recipe.yaml"} if name == "nvfp4" else {}
            model = build(MODEL, precision=name, emulate=True, **file)
            for path in LINEARS:
                linear = model.get_submodule(f"decoder.layers.{path}")
                unit = torch.eye(linear.weight.shape[1], dtype=torch.bfloat16)[:, None]
                with torch.no_grad():
                    linear.weight.div_(1 + torch.arange(len(linear.weight))[:, None] // 16)  # scales differ
                    found[f"{name} {path}"] = _digest(linear(unit)[0])
    return found


#: Name of a golden file -> what measures its content. The second table needs `world_of_one`.
LIGHT: dict[str, Callable[[], Any]] = {
    "commands": commands,
    "variables": variables,
    "flags": flags,
    "plan": plan,
    "precision": precision,
    "facade": facade,
    "specs": specs,
    "oracles": oracles,
}
BUILT: dict[str, Callable[[], Any]] = {
    "names_and_keys": names_and_keys,
    "conversion": conversion,
    "numbers": numbers,
    "training_codes": training_codes,
}
MEASURED = {**LIGHT, **BUILT}
