"""`nemotron3 recipe`: what it lists, prints and copies; a copy launches what the package's file launches."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.cli import recipes as package
from megatron_nemotron3.cli.recipes import RecipeScript, recipes
from tests.recipes.cases import BASIC, CASES, RECIPES, run

#: What each kind of recipe needs beside itself.
SHARED = {"common.sh", "node.sh", "bind.sh", "slurm.sh"}
OMNI = {"bind.sh", "slurm.sh", "omni/common.sh", "omni/pretrain_omni.py"}


def _recipe(*words: object) -> int:
    return cli.main(["recipe", *map(str, words)])


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_the_list_has_every_script_that_a_user_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert _recipe() == 0
    listed = [tuple(line.split()[:2]) for line in capsys.readouterr().out.splitlines()]
    assert listed == [(recipe.model, recipe.name) for recipe in recipes()]
    assert {(case.model, case.recipe) for case in CASES} < set(listed)
    assert {model for model, _ in listed} == {"cpu", "nano", "omni", "super", "ultra"}
    assert ("omni", "common") not in listed
    assert _recipe("super", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["model"] for one in found} == {"super"} and all(len(one["summary"]) > 20 for one in found)


def test_one_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _recipe("super", "long_context") == 0
    same = capsys.readouterr().out
    assert _recipe("Super", "Long-Context") == 0
    assert capsys.readouterr().out == same
    assert _recipe("super", "pretrain") == 0
    said = capsys.readouterr()
    assert said.out == (RECIPES / "super/pretrain.sh").read_text()
    assert said.err == (
        "nemotron3 recipe super pretrain --output DIR: copies it with the files that it sources\n"
    )


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: f"{recipe.model}-{recipe.name}")
def test_a_copy_has_what_it_needs(recipe: RecipeScript, tmp_path: Path) -> None:
    assert _recipe(recipe.model, recipe.name, "--output", tmp_path) == 0
    own = {f"{recipe.model}/{recipe.name}.sh"}
    needed = OMNI if recipe.model == "omni" else SHARED
    assert _files(tmp_path) == own | needed | ({"cpu/debug.sh"} if recipe.name == "debug_cpu" else set())
    for name in (*own, "slurm.sh", "bind.sh"):
        assert os.access(tmp_path / name, os.X_OK)
        # A copy into the checkout's own folder changes nothing there.
        assert os.access(RECIPES / name, os.X_OK)


@pytest.mark.parametrize(
    ("model", "name", "variables"),
    [
        ("super", "pretrain", {"NNODES": "384", "MASTER_ADDR": "node0"}),
        ("nano", "debug_cpu", {}),
        *(
            pytest.param(model, name, {"NNODES": "64", "MASTER_ADDR": "node0"}, marks=pytest.mark.full)
            for model, name in (("nano", "proxy"), ("ultra", "nvfp4"))
        ),
    ],
)
def test_a_copy_launches_the_same(model: str, name: str, variables: dict[str, str], tmp_path: Path) -> None:
    """From a folder that has nothing of the repository; only the place of bind.sh differs."""
    copies = tmp_path / "my recipes"
    assert _recipe(model, name, "--output", copies) == 0
    given = {"DRY_RUN": "1", **BASIC, **variables}
    ours = run(RECIPES / model / f"{name}.sh", given)
    theirs = run(Path("my recipes") / model / f"{name}.sh", given, folder=tmp_path)
    assert theirs.returncode == 0, theirs.stderr
    quoted = str(copies).replace(" ", "\\ ")
    assert theirs.stdout.replace(quoted, str(RECIPES)) == ours.stdout
    assert (quoted in theirs.stdout) is (name != "debug_cpu")


def test_omni_finds_its_script(tmp_path: Path) -> None:
    assert _recipe("omni", "disjoint", "--output", tmp_path) == 0
    entry = tmp_path / "checkout/examples/mimo/pretrain_mimo.py"
    entry.parent.mkdir(parents=True)
    entry.touch()
    given = {"DRY_RUN": "1", "MEGATRON_LM_DIR": str(tmp_path / "checkout"), "MASTER_ADDR": "node0"}
    done = run(tmp_path / "omni/disjoint.sh", given, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/omni/pretrain_omni.py" in done.stdout
    assert f"--no-python bash {tmp_path}/omni/../bind.sh" in done.stdout


def test_all_are_copied_and_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second copy changes nothing; a file that somebody edited is neither replaced nor joined by others."""
    assert _recipe("--output", tmp_path / "all", "--json") == 0
    files = {
        str(Path(file).relative_to(tmp_path / "all")) for file in json.loads(capsys.readouterr().out)["files"]
    }
    scripts = {str(p.relative_to(RECIPES)) for p in RECIPES.rglob("*.sh")}
    assert files == _files(tmp_path / "all") == scripts | {"omni/pretrain_omni.py"}
    before = (tmp_path / "all/common.sh").stat().st_mtime_ns
    assert _recipe("--output", tmp_path / "all") == 0
    assert (tmp_path / "all/common.sh").stat().st_mtime_ns == before

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/node.sh").write_text("# mine\n")
    capsys.readouterr()
    assert _recipe("super", "pretrain", "--output", tmp_path / "mine") == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/mine/node.sh" in said and "nothing was copied" in said and said.count("\n") == 1
    assert _files(tmp_path / "mine") == {"node.sh"}


def test_a_package_without_its_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as one that somebody copied without the rest of the checkout."""
    monkeypatch.setattr("megatron_nemotron3.cli.recipes.SCRIPTS", tmp_path / "recipes")
    assert _recipe() == _recipe("super", "pretrain") == _recipe("--output", tmp_path / "copy") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count(f"{tmp_path}/recipes has no recipes: install the wheel") == 3
    assert said.err.count("\n") == 3 and _files(tmp_path) == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["supr"], "no recipe of 'supr': give one of cpu, nano, omni, super, ultra; did you mean 'super'?"),
        (["super", "pretrian"], "super has no recipe 'pretrian': give one of boost, debug_cpu, "),
        (["super", "pretrian"], "; did you mean 'pretrain'?"),
        (["super", "--output", "FILE"], "FILE is not a folder"),
    ],
)
def test_one_clear_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    assert _recipe(*words) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.count("\n") == 1 and said.out == ""
    assert _files(tmp_path) == {"FILE"}


def test_a_full_disk_leaves_no_half_of_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there stays; what was copied before the disk was full is removed."""
    wanted = package.chosen("nano", "pretrain")
    first, *rest = package.copy(wanted, tmp_path)
    for path in rest:
        (tmp_path / path).unlink()
    write, written = package.write_bytes, list[Path]()

    def full(target: Path, data: bytes) -> None:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(target)
        write(target, data)

    monkeypatch.setattr(package, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        package.copy(wanted, tmp_path)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()] == [first]
