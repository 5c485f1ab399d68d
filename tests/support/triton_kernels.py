"""Which Triton kernels the package has, read from its source, and which the interpreter has run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import megatron_nemotron3

PACKAGE = Path(megatron_nemotron3.__file__).parent


def kernels() -> dict[str, set[str]]:
    """Module of the package ("layers.triton_activation") -> kernels that it defines and the host launches.

    A function that another kernel calls is a part of that one.
    """
    texts = {file: file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    trees = {file: ast.parse(text) for file, text in texts.items() if "jit" in text}
    found: dict[str, dict[str, ast.FunctionDef]] = {}
    for file, tree in trees.items():
        jitted = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(d) for d in node.decorator_list)
        ]
        if jitted:
            name = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
            found[name] = {node.name: node for node in jitted}
    bodies = [node for functions in found.values() for node in functions.values()]
    calls = [call for body in bodies for call in ast.walk(body) if isinstance(call, ast.Call)]
    called = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    return {name: set(functions) - called for name, functions in found.items()}


def note_runs() -> set[str]:
    """Names of the kernels that Triton's interpreter runs from now on."""
    from triton.runtime.interpreter import InterpretedFunction

    run, names = InterpretedFunction.run, set[str]()

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    InterpretedFunction.run = noted
    return names
