"""The table of NEMOTRON3_* variables has every one that the package reads, and the documentation shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_nemotron3.common import switches
from megatron_nemotron3.common.switches import MONITOR, SWITCHES, EnvironmentSetting

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"NEMOTRON3_[A-Z0-9]+(?:_[A-Z0-9]+)*")


def test_the_table_has_every_variable_of_the_package() -> None:
    files = [file for end in ("py", "sh") for file in (ROOT / "megatron_nemotron3").rglob(f"*.{end}")]
    found = {name for file in files for name in _NAME.findall(file.read_text(encoding="utf-8"))}
    assert found == set(SWITCHES)


def test_each_name_has_one_constant() -> None:
    constants = {name: value for name, value in vars(switches).items() if f"NEMOTRON3_{name}" == value}
    assert sorted(constants.values()) == sorted(SWITCHES)


def test_a_setting_is_of_the_table() -> None:
    with pytest.raises(KeyError, match="NEMOTRON3_NOTHING"):
        EnvironmentSetting("NEMOTRON3_" + "NOTHING", str)


def test_a_variable_is_read_once_unless_a_command_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MONITOR, "1")
    settings = [EnvironmentSetting(MONITOR, str, once=once) for once in (True, False)]
    assert [one.current() for one in settings] == ["1", "1"]
    monkeypatch.setenv(MONITOR, "2")
    assert [one.current() for one in settings] == ["1", "2"]
    with settings[0].using("3"):
        assert settings[0].current() == "3" and settings[0].read() == "2"
    assert settings[0].current() == "1" and settings[0].read({}) == ""
