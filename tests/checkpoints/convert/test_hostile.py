"""What is not a file, and files whose content means harm: one line, exit code 2, at once, in bounded memory.

Every case runs in another process with a limit on its memory and on its time.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints.convert.hf_folder import safetensors_header
from megatron_nemotron3.checkpoints.convert.job import JOURNAL, partial_of
from megatron_nemotron3.checkpoints.folders import MANIFEST
from megatron_nemotron3.models import get, tiny
from tests.support.hf_folders import write_hf

SUPER = tiny(get("super")).but(pattern="ME*", mtp_pattern=None, mtp_num_layers=0, vocab_size=40)
INDEX, FIRST = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
TRACKER = "latest_checkpointed_iteration.txt"
#: Memory, in bytes, that a command may need beyond what the process has when it starts.
MEMORY = 400 << 20
SECONDS = 20


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    error: str


class _Runner:
    """A forked process that runs one command after the other: a fork for each would take most of the time.

    A command that hangs ends it by a signal, and the next command starts another one.
    """

    def __init__(self) -> None:
        self._child, (theirs, self._commands), (self._statuses, ours) = 0, os.pipe(), os.pipe()
        self._child = os.fork()
        if self._child:
            os.close(theirs)
            os.close(ours)
            return
        try:
            os.close(self._commands)
            self._serve(os.fdopen(theirs), ours)
        finally:
            os._exit(0)

    @staticmethod
    def _serve(commands: IO[str], statuses: int) -> None:
        torch.set_num_threads(1)  # its threads do not survive a fork
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for line in commands:
            words, where, here = json.loads(line)
            os.chdir(here)
            for number, name in ((1, "stdout"), (2, "stderr")):
                file = os.open(f"{where}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(file, number)
                os.close(file)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            signal.alarm(SECONDS)
            status = 99
            try:
                status = cli.main(words)
            except SystemExit as end:
                status = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            signal.alarm(0)
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(statuses, bytes([status]))

    def run(self, words: list[str], where: Path) -> int | None:
        """The exit status; None if the command did not end."""
        os.write(self._commands, (json.dumps([words, str(where), str(Path.cwd())]) + "\n").encode())
        found = os.read(self._statuses, 1)
        if not found:
            self.close()
        return found[0] if found else None

    def close(self) -> None:
        os.close(self._commands)
        os.close(self._statuses)
        os.waitpid(self._child, 0)


_runners: list[_Runner] = []


@pytest.fixture(scope="module", autouse=True)
def runner_ends() -> Iterator[None]:
    yield
    while _runners:
        _runners.pop().close()


def run(words: list[str], where: Path) -> Result:
    """Run a command in another process. A hang ends with a signal."""
    if not _runners:
        _runners.append(_Runner())
    status = _runners[0].run(words, where)
    if status is None:
        _runners.pop()
    out, error = ((where / name).read_text() for name in ("stdout", "stderr"))
    assert status is not None, f"it hung: {out}{error}"
    return Result(status, out, error)


def refused(words: list[str], where: Path, message: str = "") -> None:
    """Run a command that must end with status 2 and one line that matches."""
    result = run(words, where)
    assert result.status == 2, result
    lines = result.error.splitlines()
    assert len(lines) == 1 and lines[0].startswith("nemotron3 ") and "Traceback" not in result.error, result
    assert lines[0].isprintable(), result
    assert message in lines[0] or re.search(message, lines[0]), result


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `hf`, `megatron`, and files that other commands read."""
    folder = tmp_path_factory.mktemp("sound")
    write_hf(folder / "hf", SUPER, files=2)
    (folder / "hf/tokenizer.json").write_text("{}")
    (folder / "hf/chat_template.jinja").write_text("{{ messages }}")
    words = ["convert", "from-hf", str(folder / "hf"), str(folder / "megatron"), "--workers", "1"]
    assert cli.main(words) == 0
    (folder / "megatron/release/integrity.json").write_text('{"algorithm": "sha256", "files": {}}')
    (folder / "precision.yaml").write_text("configs: {}\nmatchers: {}\n")
    (folder / "scales.json").write_text("{}")
    (folder / "launch.sh").write_text("torchrun pretrain_hybrid.py\n")
    return folder


# -- what is not a file ----------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def _link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "link to a pipe": _link_to_a_pipe,
    "socket": _socket,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/ptmx"),
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path),
    "terabyte": _sparse,
}
_HF = ["convert", "from-hf", "hf", "out", "--workers", "1"]
_MEGATRON = ["convert", "to-hf", "megatron", "out", "--workers", "1"]
#: File -> command that reads it.
PLACES: dict[str, list[str]] = {
    "hf/config.json": _HF,
    f"hf/{INDEX}": _HF,
    f"hf/{FIRST}": _HF,
    "hf/tokenizer.json": [*_MEGATRON, "--reference", "hf"],
    "hf/chat_template.jinja": [*_MEGATRON, "--reference", "hf"],
    "megatron/release/.metadata": _MEGATRON,
    "megatron/release/metadata.json": _MEGATRON,
    "megatron/release/__0_0.distcp": _MEGATRON,
    f"megatron/{TRACKER}": _MEGATRON,
    "megatron/release/integrity.json": ["check", "megatron/release", "--full"],
    f"megatron/{MANIFEST}": ["convert", "verify", "megatron"],
    "scales.json": [*_MEGATRON, "--quantize", "super-nvfp4", "--input-scales", "scales.json"],
    "launch.sh": ["explain", "super", "--argv", "launch.sh"],
}


def _each(places: Iterable[str]) -> list[tuple[str, str]]:
    """Each place with a pipe, which blocks who opens it, and with one of the other kinds in turn."""
    others = [kind for kind in KINDS if kind != "pipe"]
    turns = [(place, others[n % len(others)]) for n, place in enumerate(places)]
    return [*((place, "pipe") for place, _ in turns), *turns]


@pytest.mark.parametrize(("place", "kind"), _each(PLACES))
def test_no_file(sound: Path, tmp_path: Path, place: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("hf", "megatron"):
        shutil.copytree(sound / name, tmp_path / name, copy_function=os.link)
    for name in ("scales.json", "launch.sh"):
        os.link(sound / name, tmp_path / name)
    (tmp_path / place).unlink()
    KINDS[kind](tmp_path / place)
    monkeypatch.chdir(tmp_path)
    refused(PLACES[place], tmp_path)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("name", "kind"), [*_each([JOURNAL, MANIFEST, ".nemotron3.lock"]), ("", "folder"), ("", "loop")]
)
def test_in_the_unfinished_folder(
    sound: Path, tmp_path: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = partial_of(tmp_path / "out")
    if name:
        partial.mkdir()
    if (name, kind) == ("", "folder"):
        (partial / "mine").mkdir(parents=True)
    else:
        KINDS[kind](partial / name if name else partial)
    monkeypatch.chdir(tmp_path)
    refused(["convert", "from-hf", str(sound / "hf"), "out", "--workers", "1"], tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["pipe", "zero", "folder", "loop", "terabyte"])
def test_a_file_that_a_manifest_lists(sound: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(sound / "megatron", tmp_path / "megatron")
    path = tmp_path / "megatron/release/__0_0.distcp"
    path.unlink()
    KINDS[kind](path)
    result = run(["convert", "verify", str(tmp_path / "megatron"), "--workers", "1"], tmp_path)
    assert result.status == 1 and str(path) in result.out


# -- hostile content -------------------------------------------------------------------------------------


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            data.pop(key) if value is ... else data.update({key: value})
        (folder / "config.json").write_text(json.dumps(data))

    return change


def _retyped(name: str, dtype: str, keep: bool = False) -> Callable[[Path], None]:
    """Write the shards again with one tensor in another type; its bytes are zeros."""

    def change(folder: Path) -> None:
        for path in sorted(folder.glob("*.safetensors")):
            data = path.read_bytes()
            (length,) = struct.unpack_from("<Q", data)
            entries = json.loads(data[8 : 8 + length])
            entries.pop("__metadata__")
            if name not in entries:
                continue
            types = {"BF16": "bfloat16", "F32": "float32"}
            listed, parts = [], []
            for key, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
                first, last = entry["data_offsets"]
                kind, size = types[entry["dtype"]], (2 if entry["dtype"] == "BF16" else 4)
                part = data[8 + length + first : 8 + length + last]
                if key == name:
                    count = len(part) // size
                    kind = dtype
                    part = bytes(count * {"int32": 4, "float16": 2, "float32": 4}.get(dtype, 1))
                listed.append((key, kind, tuple(entry["shape"])))
                parts.append(part)
            path.write_bytes(safetensors_header(listed, {"format": "pt"}) + b"".join(parts))

    return change


def _shared_place(folder: Path) -> None:
    """Two tensors of one shape, and one place."""
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        entries = json.loads(data[8 : 8 + length])
        names = [name for name in entries if ".experts." in name and name.endswith("up_proj.weight")]
        if len(names) > 1:
            entries[names[1]]["data_offsets"] = entries[names[0]]["data_offsets"]
            text = json.dumps(entries).encode()
            path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
            return
    raise AssertionError


def _text(name: str, text: str | bytes) -> Callable[[Path], None]:
    data = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(data) and None


def _weight_map(**entries: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / INDEX).read_text())
        for name, file in entries.items():
            data["weight_map"].pop(name) if file is ... else data["weight_map"].update({name: file})
        (folder / INDEX).write_text(json.dumps(data))

    return change


def _header(data: bytes) -> Callable[[Path], None]:
    return _text(FIRST, data)


def _cut(path: Path, by: int) -> None:
    os.truncate(path, path.stat().st_size - by)


def _elsewhere(path: Path) -> None:
    target = path.parents[1] / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


_DEEP = "[" * 100_000
_LARGE = b'{"a":{"dtype":"F32","shape":[2305843009213693952],"data_offsets":[0,4]}}'
_MOE = "backbone.layers.1.mixer.experts.0.up_proj.weight"
#: Case -> (change of an HF folder, part of the message).
CONTENT: dict[str, tuple[Callable[[Path], None], str]] = {
    "I32 among BF16": (_retyped(_MOE, "int32"), f"{_MOE} is int32"),
    "F8 among BF16": (_retyped(_MOE, "float8_e4m3fn"), f"{_MOE} is float8_e4m3fn"),
    "U8 among BF16": (_retyped(_MOE, "uint8"), "is uint8"),
    "BOOL among BF16": (_retyped(_MOE, "bool"), "is bool"),
    "F16 among BF16": (_retyped(_MOE, "float16"), "others of its kind are bfloat16: give --dtype"),
    "F32 among BF16": (_retyped(_MOE, "float32"), "others of its kind are bfloat16: give --dtype"),
    "two tensors at one place": (_shared_place, "the tensor before it"),
    "a leftover quantization_config": (
        _config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}),
        "no weight is quantized",
    ),
    "a foreign quantization_config": (_config(quantization_config=5), "not an object"),
    "Puzzle of DeciLM's form": (_config(architectures=["DeciLMForCausalLM"]), "a Puzzle model of DeciLM's"),
    "Omni": (_config(architectures=["NemotronH_Nano_Omni_Reasoning_V3"]), "a Nemotron Omni model"),
    "Omni of transformers": (_config(model_type="nemotron_h_omni"), "no text_config"),
    "VL": (_config(architectures=["NemotronH_Nano_VL_V2"]), "a Nemotron VL model"),
    "VL by its parts": (_config(vision_config={}, llm_config={}), "model of text and other inputs"),
    "audio": (_config(sound_config={}), "model of text and other inputs"),
    "time steps without sense": (_config(time_step_limit={"__float__": []}), "time_step_limit"),
    "values that write to the terminal": (_config(scoring_func="\x1b[2J\x1b[H"), r"scoring_func='\x1b[2J"),
    "a model type that writes to the terminal": (_config(model_type="\x1b]0;x\x07"), "model_type"),
    "tensors that write to the terminal": (_weight_map(**{"\x1b[31m\r\n": FIRST}), r"\x1b[31m\r\n"),
    "tensors that turn the text around": (_weight_map(**{"\u202etxt": FIRST}), r"\u202e"),
    "files that write to the terminal": (_weight_map(x="\x1b[2J.safetensors"), r"\x1b[2J"),
    "a config that is a number": (_text("config.json", "5"), "not an object"),
    "a config that is deep": (_text("config.json", _DEEP), "not JSON"),
    "a config of bytes": (_text("config.json", b"\xff\xfe\x00"), "not JSON"),
    "a config of nothing": (_text("config.json", b""), "not JSON"),
    "a config with a number of a million digits": (
        _text("config.json", '{"hidden_size": ' + "9" * 10**6 + "}"),
        "not JSON",
    ),
    "an index that leads up": (_weight_map(x="../hf/" + FIRST), "expected the plain name"),
    "an index of an absolute path": (_weight_map(x="/etc/passwd"), "expected the plain name"),
    "an index of a null byte": (_weight_map(x="a\0b.safetensors"), "null byte"),
    "an index of a file that is not there": (_weight_map(x="model-9.safetensors"), "No such file"),
    "an index with one more": (_weight_map(extra=FIRST), "1 tensors are in no file, first 'extra'"),
    "an index with one less": (_weight_map(**{"lm_head.weight": ...}), "holds 'lm_head.weight', which"),
    "an index of a list": (_text(INDEX, "[]"), "not an object"),
    "an index that is huge": (lambda f: os.truncate(f / INDEX, 100 << 20), "longer than 67,108,864 bytes"),
    "no config": (lambda f: (f / "config.json").unlink(), "No such file"),
    "10^9 experts": (_config(n_routed_experts=10**9), "num_moe_experts=1,000,000,000"),
    "10^9 MTP blocks": (
        _config(num_nextn_predict_layers=10**9, mtp_hybrid_override_pattern="*E", megatron_nemotron3={}),
        "mtp_num_layers=1,000,000,000",
    ),
    "a width of 10^30": (_config(hidden_size=10**30), "hidden_size=1000000.*: give a positive number below"),
    "a file that is cut": (lambda f: _cut(f / FIRST, 1), "its tensors end at byte"),
    "a link to elsewhere": (lambda f: _elsewhere(f / FIRST), "it is a link to"),
    "an index of nothing": (_text(INDEX, "{}"), "no weight_map"),
    "an index of lists": (_text(INDEX, '{"weight_map": []}'), "no weight_map"),
    "an index that is deep": (_text(INDEX, '{"weight_map": ' + _DEEP), "not JSON"),
    "an index of the config": (_weight_map(x="config.json"), "expected the plain name"),
    "an index with a list of files": (_weight_map(x=[FIRST]), "expected the plain name"),
    "a header of nothing": (_header(b""), "too few"),
    "a header without end": (_header(b"\xff" * 8 + b"{"), "its header has 18,446,744,073,709,551,615"),
    "a header with deep values": (
        _header(struct.pack("<Q", 10**5 + 5) + b'{"a":' + _DEEP.encode()),
        "nested too deeply",
    ),
    "a header with a tensor of 2^61 elements": (
        _header(struct.pack("<Q", len(_LARGE)) + _LARGE),
        "needs 9,223,372,036,854,775,808 bytes and is given 4",
    ),
}
for _key, _values in {
    "hidden_size": (-1, 1.5, "64", None, [], True, float("nan"), float("inf")),
    "num_hidden_layers": (0, 10**9),
    "hybrid_override_pattern": ("", "M" * 5000, 5, ["mamba"], "ME*\x1b[2J"),
    "vocab_size": (2**63, ...),
    "n_routed_experts": (2**64, "all"),
    "num_attention_heads": (0, 10**9),
    "n_groups": (10**9,),
    "tie_word_embeddings": ("yes",),
    "num_nextn_predict_layers": (-1, 0.5),
    "layer_norm_epsilon": (-1.0, "small"),
    "conv_kernel": (10**6,),
}.items():
    for _value in _values:
        _said = "missing" if _value is ... else f"{_value!r:.12}"
        CONTENT[f"{_key} {_said}"] = (_config(**{_key: _value}), "")


@pytest.mark.parametrize("case", CONTENT)
def test_content(sound: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(sound / "hf", tmp_path / "hf")
    change, message = CONTENT[case]
    change(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    refused(_HF, tmp_path, message)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("limit", [[0, 1e30], [0.0, 1e38], [0, 10**40], [0.0, {"__float__": "Infinity"}]])
def test_infinite_time_steps(sound: Path, tmp_path: Path, limit: list[Any]) -> None:
    shutil.copytree(sound / "hf", tmp_path / "hf")
    _config(time_step_limit=limit)(tmp_path / "hf")
    words = ["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "out"), "--dry-run"]
    assert run(words, tmp_path).status == 0


def test_two_types_become_one(sound: Path, tmp_path: Path) -> None:
    """What the message advises works."""
    shutil.copytree(sound / "hf", tmp_path / "hf")
    _retyped(_MOE, "float32")(tmp_path / "hf")
    words = ["convert", "from-hf", str(tmp_path / "hf"), str(tmp_path / "out"), "--workers", "1"]
    assert cli.main([*words, "--dtype", "bfloat16"]) == 0


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


_INDEX, _DATA = "release/.metadata", "release/__0_0.distcp"
#: Case -> (change of a Megatron folder, part of the message).
MEGATRON: dict[str, tuple[Callable[[Path], object], str]] = {
    "file is cut": (lambda f: _cut(f / _DATA, 5000), "cut off are"),
    "file is gone": (lambda f: (f / _DATA).unlink(), "No such file"),
    "file is a link elsewhere": (lambda f: _elsewhere(f / _DATA), "it is a link to"),
    "file is zeros": (lambda f: _zeros(f / _DATA), "archive|directory|end"),
    "index is empty": (lambda f: os.truncate(f / _INDEX, 0), "the file is empty"),
    "index is cut": (lambda f: _cut(f / _INDEX, 9), "pickle|damaged|opcode"),
    "save was not finished": (lambda f: (f / "release/metadata.json").unlink(), "a save writes it last"),
    "tracker is empty": (lambda f: os.truncate(f / TRACKER, 0), "give --iteration"),
    "tracker is gone": (lambda f: (f / TRACKER).unlink(), "give --iteration"),
    "tracker names nothing": (lambda f: (f / TRACKER).write_text("12"), "iter_0000012: does not exist"),
}


@pytest.mark.parametrize("case", MEGATRON)
def test_megatron(sound: Path, tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(sound / "megatron", tmp_path / "megatron")
    change, message = MEGATRON[case]
    monkeypatch.chdir(tmp_path)
    change(tmp_path / "megatron")
    refused(_MEGATRON, tmp_path, message)
    assert not (tmp_path / "out").exists()


def test_a_manifest_that_leads_out(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound / "megatron", tmp_path / "copy")
    path = tmp_path / "copy" / MANIFEST
    data = json.loads(path.read_text())
    data["files"]["../../etc/passwd"] = {"bytes": 1, "crc32": "0"}
    path.write_text(json.dumps(data))
    result = run(["convert", "verify", str(tmp_path / "copy"), "--workers", "1"], tmp_path)
    assert result.status == 1 and "not an entry of a file below the folder" in result.out


def test_two_chunks_at_one_place(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(sound / "megatron", tmp_path / "megatron")
    path = tmp_path / "megatron/release/.metadata"
    index = pickle.loads(path.read_bytes())
    names = [k for k in index.storage_data if k.fqn.endswith("norm.weight")][:2]
    index.storage_data[names[1]] = index.storage_data[names[0]]
    path.write_bytes(pickle.dumps(index))
    monkeypatch.chdir(tmp_path)
    refused(_MEGATRON, tmp_path, "are in the same bytes of __0_0.distcp")
