"""The rooms of the package: what each may import, how large it may be, and what holds in all of them.

`ROOMS` is in the order of imports: a room imports only those before it. Budgets are in lines and only fall: a
room that has shrunk needs a smaller number here, and a larger number is a commit of its own with the reason.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAME = "megatron_nemotron3"
PACKAGE = ROOT / NAME

#: Room -> lines that it may have, in the order of imports.
ROOMS = {
    "common": 3117,
    "models": 3453,
    "cpu": 1071,
    "precision": 4369,
    "layers": 4374,
    "checkpoints": 12084,
    "launch": 10810,
    "boundary": 4340,
    "train": 10167,
    "specs": 260,
    "inference": 5853,
    "post_training": 5857,
    "run": 360,
    "proof": 10152,
    "bridge": 340,
    "cli": 1310,
}
#: A room may be this much smaller than its budget before the budget must fall, as a share.
SLACK = 0.03
LINES_OF_A_FILE = 400
#: Functions with more than six parameters, without Triton kernels: constructors and methods of upstream, and
#: the scan and its reference, with the signature of mamba-ssm; and the public `train.omni.build`, whose seed
#: users choose.
MANY_PARAMETERS = 17
#: Class names that stand for more than one class.
REPEATED_CLASSES: frozenset[str] = frozenset()
#: Modules whose import costs neither torch nor megatron, numpy, yaml, transformers.
LIGHT = (
    "boundary",
    "boundary.command",
    "boundary.layout",
    "boundary.plan",
    "boundary.traffic",
    "checkpoints",
    "checkpoints.check",
    "checkpoints.convert",
    "checkpoints.convert.command",
    "cli",
    "cli.doctor",
    "cli.recipes",
    "cli.report",
    "cli.show",
    "common",
    "common.lock",
    "common.processes",
    "common.ranks",
    "common.spawned",
    "cpu",
    "inference.generate",
    "inference.generate.command",
    "inference.refit",
    "inference.refit.command",
    "inference.refit.layouts",
    "inference.refit.shares",
    "launch",
    "launch.boosting",
    "launch.plan",
    "launch.plan.command",
    "launch.plan.flops",
    "launch.plan.memory",
    "launch.plan.state",
    "layers",
    "models",
    "models.command",
    "post_training.boost",
    "post_training.boost.command",
    "post_training.compress",
    "post_training.compress.command",
    "post_training.compress.search_command",
    "post_training.compress.sizes",
    "post_training.distill",
    "post_training.distill.logits_command",
    "post_training.finetune.command",
    "post_training.xtoken",
    "post_training.xtoken.command",
    "precision",
    "precision.census",
    "precision.command",
    "precision.model_formats",
    "precision.settings",
    "precision.table",
    "proof.bisect",
    "proof.certify",
    "proof.certify.bench",
    "proof.certify.large",
    "proof.certify.layouts",
    "proof.certify.options",
    "proof.certify.proxy",
    "proof.certify.small",
    "run",
    "train",
    "train.command",
    "train.data",
    "train.monitor.settings",
    "train.monitor.watch",
    "train.omni",
    "train.teacher",
    "train.teacher.check",
    "train.teacher.settings",
)
HEAVY = ("torch", "megatron.core", "numpy", "yaml", "transformers")
#: Rooms whose files, but for these, import no library at their top: they run where only Python is.
LOWEST = ("common", "models")
TORCH_ITSELF = ("models.definition",)


@cache
def files() -> dict[str, Path]:
    """Module name below the package -> file, without `__init__` and `__main__` of the package itself."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name and name != "__main__":
            found[name] = file
    return found


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path, known: frozenset[str]) -> Iterator[str]:
    """Modules of the package that a file imports, anywhere in it; for a name of a module, the module."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == NAME:
            base = (node.module or "")[len(NAME) + 1 :]
            for alias in node.names:
                name = f"{base}.{alias.name}" if base else alias.name
                yield name if name in known else base
        elif isinstance(node, ast.Import):
            yield from (
                alias.name[len(NAME) + 1 :] for alias in node.names if alias.name.startswith(NAME + ".")
            )


@cache
def graph() -> dict[str, frozenset[str]]:
    """Module -> the modules that it imports."""
    known = frozenset(files())
    return {name: frozenset(imported(file, known)) - {"", name} for name, file in files().items()}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def lines_of(room: str) -> int:
    return sum(len(file.read_text().splitlines()) for name, file in files().items() if room_of(name) == room)


def test_the_top_has_these_names() -> None:
    top = {p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert top - {"__init__", "__main__"} == set(ROOMS)
    assert len(ROOMS) <= 16


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str) -> None:
    order = list(ROOMS)
    against = {
        f"{name} imports {other}"
        for name, others in graph().items()
        if room_of(name) == room
        for other in others
        if order.index(room_of(other)) > order.index(room)
    }
    assert not against


def test_no_files_import_each_other() -> None:
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name in done:
            return
        for other in sorted(graph()[name]):
            walk(other, (*path, name))
        done.add(name)

    for name in graph():
        walk(name, ())


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_keep_to_their_budgets(room: str) -> None:
    lines, budget = lines_of(room), ROOMS[room]
    assert lines <= budget, f"{room} has {lines} lines, its budget is {budget}: shorten it"
    assert lines >= budget * (1 - SLACK) - 20, f"{room} has only {lines} lines: lower its budget of {budget}"


def test_no_file_is_long() -> None:
    assert not {n: k for n, f in files().items() if (k := len(f.read_text().splitlines())) > LINES_OF_A_FILE}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for name, file in files().items():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef):
                yield name, node


def test_few_functions_have_many_parameters() -> None:
    many = []
    for name, node in functions():
        given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        if len(set(given) - {"self", "cls"}) > 6 and not kernel:
            many.append(f"{name}.{node.name}")
    assert len(many) == MANY_PARAMETERS, "\n".join(many)


def test_a_class_name_stands_for_one_class() -> None:
    found = defaultdict(list)
    for name, file in files().items():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(name)
    assert {k: v for k, v in found.items() if len(v) > 1 and k not in REPEATED_CLASSES} == {}


def test_docstrings() -> None:
    """Public functions and classes have one; that of a private function has two lines at most."""
    wrong = []
    for name, file in files().items():
        for node in tree(file).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_docstring(node)
                if not node.name.startswith("_") and text is None:
                    wrong.append(f"{name}.{node.name} has none")
                if (
                    node.name.startswith("_")
                    and isinstance(node, ast.FunctionDef)
                    and (text or "").count("\n") > 1
                ):
                    wrong.append(f"{name}.{node.name} has a long one")
    assert not wrong, "\n".join(wrong)


def test_light_modules_import_nothing_heavy() -> None:
    code = (
        f"import importlib, sys\nfor name in {LIGHT!r}:\n    importlib.import_module('{NAME}.' + name)\n"
        f"    found = [m for m in {HEAVY!r} if m in sys.modules]\n    assert not found, (name, found)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("room", LOWEST)
def test_the_lowest_rooms_start_without_libraries(room: str) -> None:
    for name, file in files().items():
        if room_of(name) != room or name in TORCH_ITSELF:
            continue
        for node in tree(file).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {n.partition(".")[0] for n in names} & {"torch", "megatron", "numpy", "yaml"}, name


def sources() -> Iterator[tuple[str, str]]:
    """Python that users read: examples, and the blocks of the documentation."""
    for file in sorted((ROOT / "examples").glob("*.py")):
        yield file.name, file.read_text()
    for file in sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]):
        for block in re.findall(r"^```python\n(.*?)^```", file.read_text(), re.M | re.S):
            yield file.name, block


def bound(module: str) -> set[str]:
    """Names that a module defines or imports when it is imported."""
    found = set()
    for node in tree(files()[module]).body if module in files() else ():
        if isinstance(node, (ast.ImportFrom, ast.Import)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {
                n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
    return found


def test_docs_and_examples_import_from_rooms_only() -> None:
    """`from megatron_nemotron3 import …` or a room's: deeper modules may move, and so may those of a room."""
    public = {name for name, file in files().items() if file.name == "__init__.py" or "." not in name}
    deep = set()
    for where, text in sources():
        for found in re.finditer(rf"(?:from|import) {NAME}\.([\w.]+)", text):
            if found[1] not in public:
                deep.add(f"{where}: {found[0]}")
        for found in re.finditer(rf"from {NAME}\.([\w.]+) import (\([^)]*\)|[^\n]*)", text):
            for name in re.findall(r"\w+", found[2]):
                module = f"{found[1]}.{name}"
                if module in files() and module not in public and name not in bound(found[1]):
                    deep.add(f"{where}: import of {module}")
    assert not deep, "\n".join(sorted(deep))


def lazy_rooms() -> Iterator[tuple[str, dict[str, list[str]], set[tuple[str, str]]]]:
    """Package, its names by module, and (module, name) of what it shows to type checkers."""
    for file in sorted(PACKAGE.rglob("__init__.py")):
        package = ".".join(file.relative_to(ROOT).parent.parts)
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "lazy":
                shown = {
                    ((one.module or "")[len(package) + 1 :], alias.asname or "")
                    for below in tree(file).body
                    if isinstance(below, ast.If)
                    for one in below.body
                    if isinstance(one, ast.ImportFrom)
                    for alias in one.names
                }
                yield package, ast.literal_eval(node.args[1]), shown


def test_names_of_rooms() -> None:
    """A name is defined where the table says, type checkers see it, and no submodule hides it."""
    for package, names, shown in lazy_rooms():
        below = package[len(NAME) + 1 :]
        assert shown == {(module, name) for module, group in names.items() for name in group}, package
        for module, group in names.items():
            assert not set(group) - bound(f"{below}.{module}".lstrip(".")), package
            hidden = {name for name in group if f"{below}.{name}".lstrip(".") in files()}
            assert not hidden, f"{package}: also names of submodules"
    assert len(list(lazy_rooms())) > 15
