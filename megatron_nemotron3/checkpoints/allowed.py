"""Names in pickles of a checkpoint: what Megatron (0.16 to main), Bridge, Transformer Engine and we write.

Each is safe for a loader that imports it and calls it with any arguments, so a checkpoint that names nothing
else runs no code of its author. `getattr`, by which Python 3.11 pickles members of enumerations, is safe only
on classes of this table. Bytes that are a pickle or an archive themselves are read by the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_nemotron3.checkpoints.pickles import Inert, Refused, arguments, inert

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32"),
    *("uint16", "uint8", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_STORAGES = (
    *("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool"),
    *("ComplexDouble", "ComplexFloat", "Float8_e4m3fn", "Float8_e5m2"),
)
#: Module -> classes of plain data, enumerations among them.
_CLASSES = {
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "signal": "Signals",
    "pathlib": "PosixPath PurePosixPath Path",
    "pathlib._local": "PosixPath PurePosixPath Path",  # Python 3.13
    "datetime": "timedelta datetime timezone",
    "torch": "device Size Tensor Generator",
    "torch._C": "Generator",
    "torch.nn.parameter": "Parameter",
    "numpy": "ndarray dtype",
    "numpy.dtypes": "UInt32DType",
    "megatron.core.enums": "ModelType Fp8Recipe Fp4Recipe",
    "megatron.core.transformer.enums": "ModelType LayerType AttnType AttnMaskType AttnBackend "
    "CudaGraphModule CudaGraphScope InferenceCudaGraphScope",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState RerunValidationStatus Call "
    "Caller",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig AdamOptimizerConfig SGDOptimizerConfig",
    "megatron.core.inference.config": "PrefixCachingEvictionPolicy PrefixCachingCoordinatorPolicy "
    "KVCacheManagementMode CudaGraphSizingDistribution AsyncScheduleMode",
    "megatron.core.inference.moe": "InferenceGroupedGemmBackend",
    "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
    "transformer_engine.common.recipe": "DelayedScaling Float8CurrentScaling Float8BlockScaling "
    "MXFP8BlockScaling NVFP4BlockScaling Format _FormatHelper MMParams QParams",
}
#: Functions that make tensors and arrays of data.
_FUNCTIONS = {
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter "
    "_rebuild_parameter_with_state",
}


#: Types, which a pickle may call or name as a factory.
_BUILTINS = "dict list tuple set frozenset int float bool complex str bytearray slice"
#: Functions of torch._utils that make a tensor; their stand-ins hold (storage, offset, shape, stride, …).
TENSORS = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")


def member(cls: Any, name: Any) -> tuple[Any, ...]:
    """Stand-in for getattr: a member of an enumeration, as Python 3.11 pickles it."""
    known = isinstance(cls, type) and issubclass(cls, Inert) and isinstance(name, str)
    if not known or not name.isidentifier() or name.startswith("_"):
        raise Refused("it calls getattr for something else than a member of an enumeration")
    return cls, name


def _encoded(text: Any = "", encoding: Any = "") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise Refused(f"it encodes a {type(text).__name__} by {encoding!r:.40}, not bytes as protocol 2 does")
    return text.encode("latin-1")


def _rebuilt(function: Any, cls: Any, values: Any, *rest: Any) -> Any:
    if not isinstance(function, type) or function.__name__ not in TENSORS:
        raise Refused("it rebuilds a tensor by something else than a function of torch")
    return function(*values), cls, rest


def names(nested: Callable[[Any], Any]) -> Mapping[tuple[str, str], Any]:
    """Return (module, name) -> stand-in; `nested` reads bytes that a loader would read as a pickle."""

    class BytesIO(Inert):  # Transformer Engine 1 has its state in one
        __slots__ = ()

        def __init__(self, *args: Any) -> None:
            for data in args:
                nested(data)

        def __setstate__(self, state: Any) -> None:
            nested(state[0] if isinstance(state, tuple) and state else state)

    listed = [(module, name) for module, text in (_CLASSES | _FUNCTIONS).items() for name in text.split()]
    builtins: dict[str, Any] = dict.fromkeys(_BUILTINS.split(), arguments)
    builtins |= {"getattr": member, "bytes": lambda *args: args or b""}
    return {
        **{(module, name): inert(name) for module, name in listed},
        **{("torch", name): name for name in _DTYPES},
        **{("torch", f"{name}Storage"): f"{name}Storage" for name in _STORAGES},
        **{(module, name): builtins[name] for name in builtins for module in ("builtins", "__builtin__")},
        ("_codecs", "encode"): _encoded,
        ("collections", "OrderedDict"): dict,
        ("collections", "Counter"): dict,
        ("collections", "defaultdict"): lambda *args: {},
        ("collections", "deque"): lambda *args: [*args],
        ("torch.storage", "UntypedStorage"): "UntypedStorage",
        ("torch.storage", "_load_from_bytes"): nested,
        ("megatron.core.safe_globals", "safe_load_from_bytes"): nested,
        ("torch._tensor", "_rebuild_from_type_v2"): _rebuilt,
        ("io", "BytesIO"): BytesIO,
        ("_io", "BytesIO"): BytesIO,
    }
