"""NEMOTRON3_EMULATE and --nemotron3-emulate: what they mean, and that a bad value is refused early."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3 import cli, run
from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.precision.settings import (
    OPTION,
    SWITCHES,
    Emulation,
    emulation_in_environment,
    parse_emulation,
)

MEANINGS = {
    "": None,
    "0": None,
    "nvfp4": Emulation(),
    "nvfp4, rht=0,sr=0": Emulation(hadamard=False, stochastic=False),
    "nvfp4,2d=0,wgrad=0,every_layer=1": Emulation(tile=False, wgrad=False, every_layer=True),
    "mxfp8": Emulation(format="mxfp8"),
    "mxfp8,fprop=0": Emulation(format="mxfp8", fprop=False),
}
BAD = {
    "fp8-tensorwise": "'fp8-tensorwise' is not emulated: start with nvfp4, mxfp8",
    "1": "'1' is not emulated",
    "0,sr=0": "'0' is not emulated",
    "nvfp4,hadamard=0": "'hadamard' is no switch of nvfp4: use rht, sr",
    "mxfp8,rht=0": "'rht' is no switch of mxfp8: use fprop, dgrad, wgrad, every_layer",
    "nvfp4,sr": "give sr=0 or sr=1",
    "nvfp4,sr=2": "give sr=0 or sr=1",
    "nvfp4,sr=0,sr=1": "sr is given twice",
    "nvfp4,fprop=0,dgrad=0,wgrad=0": "fprop=0, dgrad=0 and wgrad=0 leave no matmul to quantize",
}


def test_meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, meaning in MEANINGS.items():
        monkeypatch.setenv(EMULATE, text)
        assert emulation_in_environment() == meaning
    for field, _ in SWITCHES.values():
        changed = Emulation(**{field: not getattr(Emulation(), field)})
        assert parse_emulation(changed.text()) == changed != Emulation()


def test_bad_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused by the variable, by the launcher of a script before it starts, and by commands."""
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('started')")
    flags = ["flags", "super", "--tiny", "--precision", "nvfp4", "--emulate", "--backend", "torch"]
    for text, words in BAD.items():
        monkeypatch.setenv(EMULATE, text)
        with pytest.raises(ValueError, match=f"{EMULATE}='{text}': .*{words}"):
            emulation_in_environment()
        with pytest.raises(SystemExit) as stopped:
            run.main([str(script)])
        assert stopped.value.code == 2 and words in capsys.readouterr().err
        assert cli.main([*flags, "--te-precision-config-file", "f.yaml"]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.delenv(EMULATE)
    for value in ("", "nvfp5"):
        with pytest.raises(SystemExit) as stopped:
            run.main([str(script), f"{OPTION}={value}"])
        assert stopped.value.code == 2 and EMULATE in capsys.readouterr().err


def test_the_launcher_takes_the_option_from_anywhere() -> None:
    for words in (
        [OPTION, "nvfp4,sr=0", "script.py", "--lr", "1"],
        ["script.py", "--lr", "1", OPTION, "nvfp4,sr=0"],
        ["script.py", f"{OPTION}=nvfp4,sr=0", "--lr", "1"],
        [f"{OPTION}=nvfp4", "script.py", "--lr", "1", OPTION, "nvfp4,sr=0"],
    ):
        found = run.split_arguments(words)
        assert (found.script, found.arguments, found.emulate) == ("script.py", ["--lr", "1"], "nvfp4,sr=0")
    assert run.split_arguments(["script.py"]).emulate is None


def test_words_after_the_script_are_its_own() -> None:
    """Also those that look like the launcher's or are none of it, and what argparse treats specially."""
    own = ["-h", "--device", "cuda", "--", "--mo", "--unknown=1", "-x", "a b"]
    for before in (["--device=CPU"], ["--device", "cpu", "--"]):
        found = run.split_arguments([*before, "script.py", *own])
        assert (found.device, found.script, found.arguments) == ("cpu", "script.py", own)
