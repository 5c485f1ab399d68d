"""The page docs/reference/checkpoint_names.md: the table of tensors, in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from megatron_nemotron3.checkpoints.convert import config_keys, inventory
from megatron_nemotron3.models import get
from megatron_nemotron3.models.config import BUILT, Nemotron3Config
from megatron_nemotron3.models.tensors import (
    DIALECTS,
    PARAMETER,
    ROWS,
    TORCH_DIST,
    NamedShape,
    Row,
    Spelling,
    symbol_sizes,
)
from tests.docs.models_table import tables
from tests.support.megatron_tensors import megatron_tensors

_PARTS = {
    "model": ("Model", "", ""),
    "M": ("M: Mamba-2", "decoder.layers.L.", "backbone.layers.L."),
    "*": ("*: attention", "decoder.layers.L.", "backbone.layers.L."),
    "E": ("E: mixture of experts", "decoder.layers.L.", "backbone.layers.L."),
    "-": ("-: dense MLP", "decoder.layers.L.", "backbone.layers.L."),
    "mtp_in": ("MTP block, before its layers", "mtp.layers.o.", "mtp.layers.{o * P}."),
    "mtp_out": ("MTP block, after its layers", "mtp.layers.o.", "mtp.layers.{o * P + P - 1}."),
}

_INTRO = """\
# Checkpoint names: Megatron and Hugging Face

Generated: `python -m tests.docs.pages`. The table
is `megatron_nemotron3/models/tensors.py`; [Checkpoints](../checkpoints.md) says how to convert.

- *Megatron* is the key in a torch_dist folder. Shapes are global and do not depend on the parallel layout.
  `{e}` is the global number of an expert. Shapes are in brackets; the symbols are explained below.
- *Rule* converts Megatron's tensors to Hugging Face's; every rule only copies elements.
- *TP* is how Megatron splits the parameter over tensor-parallel ranks (routed experts: over the ranks of
  `--expert-tensor-parallel-size`). `parts`: each of the listed parts is split separately.
- All tensors have the model's type (BF16 as released), except the rows marked FP32.
"""

_RULES = """\
## Rules

| rule | what it does |
|-|-|
| copy | the same tensor |
| vocabulary | the first rows of Megatron's padded table; going back, zero rows are appended |
| concat | Megatron's tensors concatenated along axis 0 |
| stack | Megatron has one tensor for all experts, Hugging Face one tensor per expert |
| qkv | rows `[q … q, k, v]` of each KV group become q, k and v of all groups; a head has `kv_channels` rows |

`linear_qkv` is cut into equal bands of rows, even if TP exceeds the number of KV groups: no KV head is
stored twice.

## Multi-token prediction

Megatron numbers the blocks `o` and the layers `i` of each block; Hugging Face numbers all MTP layers
consecutively. With `P` layers per block, `mtp.layers.o.mtp_model_layer.layers.i.` is
`mtp.layers.{o * P + i}.`, followed by the same names as in a decoder layer of that kind. A block that
training applies at several depths (`--mtp-use-repeated-layer`, all released models) is stored once, and
`num_nextn_predict_layers` in config.json is the number of stored blocks.
"""

_PYTHON = """\
## From Python

```python
from megatron_nemotron3.checkpoints.convert import inventory, plan
from megatron_nemotron3.checkpoints.convert.keys import NameLookup
from megatron_nemotron3.models import get

config = get("super")
match = NameLookup(config).key("decoder.layers.7.self_attention.linear_qkv.weight")
match.row.hf  # q_proj, k_proj, v_proj
for mapping in inventory.mappings(config):  # tensors that are converted into each other
    mapping.megatron, mapping.hf  # names, shapes, types
    mapping.to_hf()  # which slices of the one are which slices of the other; .inverse() goes back
```

A plan is data: `plan.apply` applies it in memory to torch tensors or numpy arrays, and `views.Converted` to
slices of files.
"""


def _cell(stored: tuple[NamedShape, ...], prefix: str = "") -> str:
    return "<br>".join(f"`{prefix}{t.name}` [{', '.join(t.shape)}]" for t in stored)


def _table_line(row: Row) -> str:
    first = row.spellings[0]
    kind = ", FP32" if row.float32 else ""
    needs = f", needs {row.needs}" if row.needs else ""
    return f"| {_cell(first.tensors)} | {_cell(row.hf)} | {first.rule}{kind}{needs} | {row.tp} |"


def _other_spellings() -> Iterator[tuple[Row, Spelling]]:
    for dialect in DIALECTS:
        for row in ROWS:
            for spelling in row.spellings:
                if spelling.dialect == dialect != TORCH_DIST:
                    yield row, spelling


def _spelling_section() -> list[str]:
    lines = [
        "## Other spellings",
        "",
        f"These are read as well, and may be mixed. `{PARAMETER}` is the name in `named_parameters()` where",
        "it differs from the torch_dist key; the others come from other specs and versions. Prefixes of",
        "wrappers (`module.`, `model.`) are removed, and `transformer_layer.layers.` in an MTP block is read",
        "as `mtp_model_layer.layers.`.",
        "",
        "| spelling | layer | Megatron | Hugging Face | rule |",
        "|-|-|-|-|-|",
    ]
    for row, spelling in _other_spellings():
        hf = "<br>".join(f"`{t.name}`" for t in row.hf)
        lines.append(
            f"| {spelling.dialect} | `{row.part}` | {_cell(spelling.tensors)} | {hf} | {spelling.rule} |"
        )
    return lines


def _symbol_section() -> list[str]:
    lines = [
        "## Shape symbols and sizes",
        "",
        "`latent` is the input width of the routed experts: the hidden size if there is no latent space.",
        "`padded_vocab` is the vocabulary size, padded by `--make-vocab-size-divisible-by` and TP.",
        "",
    ]
    symbols = [s for s in symbol_sizes(get("super")) if s not in ("1", "2d", "padded_vocab")]
    rows: list[tuple[str, Callable[[Nemotron3Config], object]]] = [
        *((symbol, partial(_size, symbol)) for symbol in symbols),
        ("tensors, Hugging Face", lambda config: len(inventory.hf_tensors(config))),
        ("tensors, torch_dist", lambda config: len(megatron_tensors(config))),
    ]
    return lines + list(tables(rows, "###"))[:-1]


def _size(symbol: str, config: Nemotron3Config) -> str | int | None:
    """The size of a symbol in a model; the least and the most where its decoder layers differ."""
    size = symbol_sizes(config)[symbol]
    widths = sorted({width for width, _ in config.expert_sizes}) if symbol == "ffn" else []
    if len(widths) > 1:
        return f"{widths[0]:,} to {widths[-1]:,}"
    return size or None


def _config_section() -> list[str]:
    tables = {**config_keys.FIELDS, **config_keys.DENSE, **config_keys.MOE}
    lines = [
        "## config.json",
        "",
        "`checkpoints.convert.config_json.read` and `write`. Layers are a pattern string "
        f"(`{config_keys.LAYERS[0]}`, `{config_keys.MTP_LAYERS[0]}`) or a list of block types "
        f"(`{config_keys.LAYERS[1][0]}`, `{config_keys.MTP_LAYERS[1][0]}`); either is "
        "read, and the string written, or the list where a reference has only that. Block types: "
        + ", ".join(f"`{block}` {kind}" for block, kind in config_keys.BLOCKS.items())
        + ". Values that contradict each other or that Megatron cannot build are refused; keys that no "
        "reader of the family uses are kept and named.",
        "",
        "| `Nemotron3Config` | config.json | also read |",
        "|-|-|-|",
    ]
    for field, keys in tables.items():
        lines.append(f"| `{field}` | `{keys[0]}` | {', '.join(f'`{key}`' for key in keys[1:]) or 'none'} |")
    fixed = {**config_keys.FIXED, **{config_keys.FIELDS[f][0]: v for f, v in BUILT.items()}}
    lines += [
        "",
        "Only with these values, where stated: "
        + ", ".join(f"`{k}` {v}" for k, v in fixed.items())
        + f"; `{config_keys.NORMALIZED}` True, but False with one expert per token.",
        "",
        f"`{config_keys.CLAMPS[-1]}` is written as {config_keys.DEFAULT_CLAMP}, as in released files; a "
        "reference's value is kept. It is the smallest time step of a new model. transformers without its "
        "pull request 48989 (5.24 and before) also clamps every time step below at it, which Megatron and "
        "vLLM do not, and so computes other logits: the conversion says so, and `--check-logits` computes "
        "without the clamp. Such transformers cannot have both. A tiny value would turn the clamp off, "
        "but stay in the file after that request, and let nearly all heads of a new model begin at "
        "`time_step_floor` (0.0001), which nothing reports. The clamp can be turned off where it is: "
        "`time_step_limit = (0, inf)` of each Mamba mixer of a loaded model, which changes nothing after "
        "the request.",
    ]
    return lines


def markdown() -> str:
    """Return the page."""
    lines = [_INTRO]
    for part, (title, megatron, hf) in _PARTS.items():
        where = f" (`{megatron}…`, `{hf}…`)" if megatron else ""
        lines += [f"## {title}{where}", "", "| Megatron | Hugging Face | rule | TP |", "|-|-|-|-|"]
        lines += [_table_line(row) for row in ROWS if row.part == part]
        lines.append("")
    lines += [_RULES, *_spelling_section(), "", *_symbol_section(), "", *_config_section(), "", _PYTHON]
    return "\n".join(lines).rstrip("\n") + "\n"
