"""Which Triton kernels the package has, read from its source, and which the interpreter has run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import torch

import megatron_nemotron3

PACKAGE = Path(megatron_nemotron3.__file__).parent


def kernels() -> dict[str, set[str]]:
    """Module of the package ("precision.triton_grouped") -> kernels that it defines and the host launches.

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


def repair_interpreter() -> None:
    """Three gaps of the interpreter of Triton 3.6. numpy >= 2.4 refuses its loop bounds (arrays of one
    element as numbers). It multiplies the bit patterns of BF16. It cuts FP32 to BF16; a GPU rounds."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    patch, dot, cast = interpreter._patch_lang_tensor, builder.create_dot, builder.cast_impl

    def patch_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def round_to_nearest(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, dtype)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    interpreter._patch_lang_tensor = patch_index
    builder.create_dot = lambda self, a, b, *rest: dot(self, widen(a), widen(b), *rest)
    builder.cast_impl = round_to_nearest
