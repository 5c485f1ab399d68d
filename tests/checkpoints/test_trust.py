"""Checkpoints that would run code: `check` names the object, and no command starts on one."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from megatron_nemotron3 import cli
from megatron_nemotron3.checkpoints import resume
from megatron_nemotron3.checkpoints.convert.bridge_checkpoint import add_arguments
from megatron_nemotron3.checkpoints.convert.into_model import load_base
from megatron_nemotron3.checkpoints.trust import hostile_objects
from megatron_nemotron3.common.switches import LORA, TRUST_CHECKPOINT, environment
from megatron_nemotron3.models import get, tiny
from tests.support import checkpoint_writer as writer
from tests.support.hf_folders import write_hf

STATE = "decoder.layers.0.mixer.in_proj._extra_state/shard_0_1"


class _Call:
    """Pickled as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def evil(folder: Path) -> _Call:
    """What makes the canary of a test when it is unpickled."""
    return _Call(os.system, f"touch {folder}/CANARY")


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def as_tensor(data: bytes) -> torch.Tensor:
    """Bytes as Transformer Engine 2 keeps the state of a module."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def store(checkpoint: Path, name: str, data: bytes) -> None:
    """Put an object into a torch_dist folder, in place of the one of this name."""
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    file = checkpoint / next(iter(index.storage_data.values())).relative_path
    index.state_dict_metadata[name] = BytesStorageMetadata()
    index.storage_data[MetadataIndex(name)] = _StorageInfo(file.name, file.stat().st_size, len(data))
    with file.open("ab") as out:
        out.write(data)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def _dropped(call: bytes) -> bytes:
    """A pickle that calls, and forgets the result."""
    return b"\x80\x02" + call.removeprefix(b"\x80\x02")[:-1] + b"0N."


def _archived(data: bytes) -> bytes:
    """An archive of torch.save whose pickle is `data`."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", content)
    return stream.getvalue()


#: Place -> change of a checkpoint, given what a test may touch.
PLACES: dict[str, Callable[[Path, Path], None]] = {
    "common.pt": lambda path, at: torch.save({"iteration": 2, "args": evil(at)}, path / "common.pt"),
    "common state": lambda path, at: store(path, "common_state/shard_0_1", saved([{"args": evil(at)}])),
    "state of a module": lambda path, at: store(path, STATE, saved(evil(at))),
    "random state": lambda path, at: store(path, "rng_state/shard_0.0_1.1", saved([{"a": evil(at)}])),
    "optimizer": lambda path, at: store(path, "optimizer.param_state/shard_0_1", saved({1: evil(at)})),
    "pickle in a tensor": lambda path, at: store(path, STATE, saved(as_tensor(pickle.dumps(evil(at))))),
    "pickle in a parameter": lambda path, at: store(
        path,
        STATE,
        saved(torch.nn.Parameter(as_tensor(pickle.dumps(evil(at))), requires_grad=False)),
    ),
    "pickle in a view": lambda path, at: store(
        path, STATE, saved(as_tensor(b"N." + pickle.dumps(evil(at)))[2:])
    ),
    "pickle in BytesIO": lambda path, at: store(path, STATE, saved(io.BytesIO(pickle.dumps(evil(at))))),
    "archive in BytesIO": lambda path, at: store(path, STATE, saved(io.BytesIO(saved(evil(at))))),
    "bytes of a tensor": lambda path, at: store(
        path,
        STATE,
        saved(_Call(torch.storage._load_from_bytes, saved(evil(at), _use_new_zipfile_serialization=False))),
    ),
    "bytes of a tensor in a tensor": lambda path, at: store(
        path,
        STATE,
        saved(as_tensor(pickle.dumps(_Call(torch.storage._load_from_bytes, pickle.dumps(evil(at)))))),
    ),
    "result that is dropped": lambda path, at: store(
        path, STATE, _archived(_dropped(pickle.dumps(evil(at), 2)))
    ),
    "no archive": lambda path, at: store(path, STATE, saved(evil(at), _use_new_zipfile_serialization=False)),
    "attribute of a class": lambda path, at: store(path, STATE, saved(_Call(getattr, dict, "__base__"))),
    "attribute of an enumeration": lambda path, at: store(
        path,
        STATE,
        _archived(b"\x80\x02cbuiltins\ngetattr\ncsignal\nSignals\nX\x07\x00\x00\x00__doc__\x86R."),
    ),
    "class that is changed": lambda path, at: store(
        path, STATE, _archived(b"\x80\x02cargparse\nNamespace\nN}X\x01\x00\x00\x00aK\x01s\x86b.")
    ),
    "program of TorchScript": lambda path, at: torch.jit.save(
        torch.jit.script(torch.nn.Linear(1, 1)), path / "train_state.pt"
    ),
    "file of a rank": lambda path, at: (
        (path / "mp_rank_00").mkdir()
        or torch.save(
            {"model": {"a._extra_state": as_tensor(pickle.dumps(evil(at)))}}, path / "mp_rank_00/a.pt"
        )
    ),
}


#: Places whose message is another one than that of a name.
REASONS = {
    "pickle in a view": f"{STATE} has a state that is a view of shape (",
    "no archive": f"{STATE} holds names that are unknown: it is not an archive of torch.save",
    "attribute of a class": f"{STATE} calls getattr for something else than a member",
    "attribute of an enumeration": f"{STATE} calls getattr for something else than a member",
    "class that is changed": f"{STATE} is not a readable pickle",
    "program of TorchScript": "train_state.pt: the file holds names that are unknown: record",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with checkpoint 2."""
    writer.write(tmp_path / "run" / "iter_0000002", writer.tensors(), 2)
    (tmp_path / "run" / writer.TRACKER).write_text("2")
    return tmp_path / "run"


def _one_line(text: str, *parts: str) -> None:
    lines = [line for line in text.splitlines() if line]
    assert len(lines) == 1 and all(part in lines[0] for part in parts), text


@pytest.mark.parametrize("place", PLACES)
def test_check_names_the_object(root: Path, place: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "iter_0000002"
    PLACES[place](path, root)
    capsys.readouterr()
    assert cli.main(["check", str(path), "--full"]) == 2
    out, err = capsys.readouterr()
    problem = err.splitlines()[0]
    assert problem.startswith(f"nemotron3 check: {path}/") and problem.isprintable()
    assert REASONS.get(place, "names posix.system, which no checkpoint needs") in problem
    assert "arguments    not shown" in out or place != "common state"
    assert not (root / "CANARY").exists()


def test_the_index(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names of torch.distributed that no index has are foreign, too."""
    path = root / "iter_0000002"
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = _Call(torch.distributed.run.main, ["x"])
    (path / ".metadata").write_bytes(pickle.dumps(index))
    (problem,) = hostile_objects(path)
    assert f"{path}/.metadata: it names " in problem and "which no checkpoint needs" in problem
    assert cli.main(["check", str(path)]) == 2
    _one_line(capsys.readouterr().err, problem)


def test_the_memory_and_time_of_an_object(root: Path) -> None:
    path = root / "iter_0000002"
    store(path, "a/shard_0_1", _archived(b"\x80\x02}r\xff\xff\xff\x7f."))
    assert "a/shard_0_1 is not a pickle of a checkpoint: it needs more than" in hostile_objects(path)[0]


# -- what passes -----------------------------------------------------------------------------------------


def test_states_of_modules_pass(root: Path) -> None:
    """As Transformer Engine 1 and 2 write them, with tensors inside."""
    state = {"recipe": None, "scale_fwd": torch.ones(3), "extra_fp8_variables": {"num_gemms": 1}}
    path = root / "iter_0000002"
    for number, one in enumerate(
        (
            as_tensor(pickle.dumps(state)),
            io.BytesIO(saved(state)),
            torch.empty(0, dtype=torch.uint8),
            io.BytesIO(),
            [None],
            None,
        )
    ):
        store(path, f"decoder.layers.{number}.a._extra_state/shard_0_1", saved(one))
    assert hostile_objects(path) == []


def test_data_of_numpy_and_python_pass(root: Path) -> None:
    import collections
    import random
    import signal

    import numpy

    state = {
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
        "scalar": numpy.float64(1.5),
        "signal": signal.SIGTERM,
        "bytes": b"\x00\xff",
        "dict": collections.defaultdict(list, a=[1]),
        "ordered": collections.OrderedDict(a=1),
        "deque": collections.deque([1, 2], 3),
        "args": Namespace(dtype=torch.bfloat16, path=Path("a"), some={1, 2}, device=torch.device("cpu")),
        "tensor": torch.nn.Parameter(torch.ones(2)),
    }
    for protocol in (2, 4):
        store(root / "iter_0000002", f"rng_state/{protocol}", saved(state, pickle_protocol=protocol))
    assert hostile_objects(root / "iter_0000002") == []


# -- doors -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was converted from Hugging Face's form."""
    folder = tmp_path_factory.mktemp("converted")
    write_hf(folder / "hf", tiny(get("nano")))
    words = ["convert", "from-hf", str(folder / "hf"), str(folder / "megatron"), "--workers", "1"]
    assert cli.main(words) == 0
    return folder / "megatron"


@pytest.fixture
def hostile(converted: Path, tmp_path: Path) -> Path:
    """The same with a hostile state of a module."""
    assert hostile_objects(converted / "release") == []
    shutil.copytree(converted, tmp_path / "hostile")
    store(tmp_path / "hostile/release", STATE, saved(evil(tmp_path)))
    return tmp_path / "hostile"


_TRAIN = ["train", "nano-tiny", "--device", "cpu", "--steps", "1", "--output", "out"]
DOORS = {
    "pretrained": [*_TRAIN, "--pretrained", "HOSTILE"],
    "resumed": [*_TRAIN[:-1], "run"],
    "options after --": [*_TRAIN, "--", "--load", "HOSTILE"],
    "teacher": [*_TRAIN, "--teacher", "HOSTILE"],
    "base of adapters": _TRAIN,
    "logits": ["distill", "logits", "HOSTILE", "--output", "out", "--samples", "1"],
}


@pytest.mark.parametrize("door", DOORS)
def test_commands(
    door: str, hostile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(hostile.parent)
    if door == "resumed":
        Path("run").mkdir()
        hostile.rename("run/checkpoints")
    words = [word.replace("HOSTILE", str(hostile)) for word in DOORS[door]]
    with environment(LORA, f"base={hostile}" if door == "base of adapters" else ""):
        assert cli.main(words) == 2
    where = "run/checkpoints/release" if door == "resumed" else f"{hostile}/release"
    _one_line(capsys.readouterr().err, where, STATE, "names posix.system", "give --trust-checkpoint")
    assert not Path("CANARY").exists() and not Path("out/train.log").exists()


@pytest.mark.parametrize(
    "option", ["--load", "--pretrained-checkpoint", "--export-kd-teacher-load", "--ref-load"]
)
def test_options_of_a_script(option: str, hostile: Path) -> None:
    with pytest.raises(ValueError, match="names posix.system"):
        resume.require_trusted_start([option, str(hostile)])
    with environment(TRUST_CHECKPOINT, "1"):
        resume.require_trusted_start([option, str(hostile)])


@pytest.mark.parametrize("place", ["common", "state of a module"])
def test_a_checkpoint_on_the_disk_of_a_node(place: str, tmp_path: Path) -> None:
    """Each rank has a folder; a save that was interrupted is not loaded."""
    words = ["--non-persistent-ckpt-type", "local", "--non-persistent-local-ckpt-dir", str(tmp_path)]
    (tmp_path / "1").mkdir()
    resume.require_trusted_start(words)
    sound = ShardedTensor.from_rank_offsets("w", torch.ones(3))
    kept = MCoreTensorAwareStateDict({"iteration": 2}, {"model": {"w": sound}})
    torch.save(kept, tmp_path / "1" / "iter_0000002_1_local.pt")
    (tmp_path / "1" / "iter_0000004_1_local.dirty.pt").write_bytes(b"PK")
    resume.require_trusted_start(words)
    if place == "common":
        kept.common["args"] = evil(tmp_path)
    else:
        state = as_tensor(pickle.dumps(evil(tmp_path)))
        kept.sharded_state_dict["model"][STATE] = ShardedObject(STATE, state, (1,), (0,))
    torch.save(kept, tmp_path / "1" / "iter_0000002_1_local.pt")
    with pytest.raises(ValueError, match=r"/1/iter_0000002_1_local.pt: the file names posix.system"):
        resume.require_trusted_start(words)
    with environment(TRUST_CHECKPOINT, "1"):
        resume.require_trusted_start(words)


def test_the_iteration_that_is_named(root: Path) -> None:
    shutil.copytree(root / "iter_0000002", root / "iter_0000004")
    PLACES["common state"](root / "iter_0000004", root)
    resume.require_trusted_start(["--load", str(root)])
    with pytest.raises(ValueError, match="iter_0000004"):
        resume.require_trusted_start(["--load", str(root), "--ckpt-step", "4"])


def test_functions_that_load(hostile: Path) -> None:
    with pytest.raises(ValueError, match="names posix.system"):
        load_base(None, hostile)
    (hostile / "release/run_config.yaml").write_text("{model: {}, train: {}}")
    torch.save({}, hostile / "release/train_state.pt")
    with pytest.raises(ValueError, match="names posix.system"):
        add_arguments(hostile / "release")


_SCRIPT = """import sys
from megatron.core.dist_checkpointing import load_common_state_dict
load_common_state_dict(sys.argv[sys.argv.index("--load") + 1] + "/iter_0000002")
"""


def test_the_launcher(root: Path) -> None:
    """It refuses before the script starts; trusted, Megatron runs the command: so the refusal matters."""
    PLACES["common state"](root / "iter_0000002", root)
    (root / "script.py").write_text(_SCRIPT)

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megatron_nemotron3.run", "--device", "cpu", *words]
        return subprocess.run(
            [*command, str(root / "script.py"), "--load", str(root)], capture_output=True, text=True
        )

    refused = launch()
    assert refused.returncode == 2 and not (root / "CANARY").exists()
    _one_line(refused.stderr, "common_state/shard_0_1 names posix.system", "--trust-checkpoint")
    launch("--trust-checkpoint")
    assert (root / "CANARY").exists()


@pytest.mark.parametrize("text", [None, "[1, 2]", "a: [", "train: {}"])
def test_other_folders_are_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run_config.yaml").write_text(text)
    with pytest.raises(ValueError, match="is not a checkpoint of Megatron-Bridge"):
        add_arguments(tmp_path)
    assert not (tmp_path / "common.pt").exists()
