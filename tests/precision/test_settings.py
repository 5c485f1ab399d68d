"""NEMOTRON3_EMULATE: read in one place, refused early."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_nemotron3.common.switches import EMULATE
from megatron_nemotron3.precision.settings import (
    SWITCHES,
    Emulation,
    emulation_in_environment,
    parse_emulation,
)
from megatron_nemotron3.run import main


def test_text_and_back() -> None:
    for field, _ in SWITCHES.values():
        changed = Emulation(**{field: not getattr(Emulation(), field)})
        assert parse_emulation(changed.text()) == changed != Emulation()
    assert parse_emulation("0") is None and parse_emulation("nvfp4") == Emulation()


@pytest.mark.parametrize("text", ["nvfp5", "nvfp4,rht", "nvfp4,rht=2", "nvfp4,what=0", "1"])
def test_the_launcher_refuses_a_bad_value(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('started')")
    monkeypatch.setenv(EMULATE, text)
    with pytest.raises(ValueError, match=EMULATE):
        emulation_in_environment()
    with pytest.raises(SystemExit) as stopped:
        main([str(script)])
    assert stopped.value.code == 2 and EMULATE in capsys.readouterr().err
