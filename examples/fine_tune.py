#!/usr/bin/env python3
"""Fine-tune a tiny model on a CPU: Hugging Face folder -> Megatron -> conversations -> held-out loss.

    python examples/fine_tune.py HF_DIR TOKENIZER [OUT]

HF_DIR is the tiny Super as `nemotron3 convert to-hf runs/demo/checkpoints hf` writes it, TOKENIZER the folder
of its tokenizer (runs/demo/data/*/tokenizer). The conversations ask what functions of Python's standard
library do, and the assistant answers with the first lines of their documentation. One function in eight is
held out: the loss of its answer is measured before and after, and nothing is trained on it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

MODULES = """
    argparse ast asyncio base64 calendar collections configparser csv datetime decimal difflib email.message
    fractions functools glob gzip heapq html http.client inspect io ipaddress itertools json logging math
    multiprocessing operator os os.path pathlib pickle platform queue random re shlex shutil socket sqlite3
    statistics string struct subprocess sys tarfile tempfile textwrap threading time tokenize types typing
    unittest urllib.parse urllib.request uuid warnings weakref xml.dom zipfile zlib
"""
#: The template of the conversations: plain words, so that the model's vocabulary stays as it is.
TEMPLATE = (
    "{% for m in messages %}{{ 'Question: ' if m.role == 'user' else 'Answer: ' }}{{ m.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)
STEPS = 60


def questions() -> dict[str, dict[str, object]]:
    """Conversations by name of the function; equal answers appear once."""
    found: dict[str, dict[str, object]] = {}
    answers = set()
    for name in MODULES.split():
        module = importlib.import_module(name)
        for key, value in sorted(vars(module).items()):
            text = inspect.getdoc(value) if callable(value) and not key.startswith("_") else None
            answer = (text or "").split("\n\n")[0].replace("\n", " ").strip()
            if 20 <= len(answer) <= 400 and answer not in answers:
                answers.add(answer)
                ask = {"role": "user", "content": f"What does {name}.{key} do?"}
                found[f"{name}.{key}"] = {"messages": [ask, {"role": "assistant", "content": answer}]}
    return found


def write_conversations(out: Path) -> tuple[Path, Path]:
    """Write conversations to train on and the others; a function's name decides."""
    files = out / "train.jsonl", out / "held_out.jsonl"
    lines: tuple[list[str], list[str]] = ([], [])
    for name, conversation in questions().items():
        lines[zlib.crc32(name.encode()) % 8 == 0].append(json.dumps(conversation))
    for file, some in zip(files, lines):
        file.write_text("\n".join(some) + "\n", encoding="utf-8")
        print(f"{file}: {len(some)} conversations")
    return files


def tokenizer_with_template(source: Path, folder: Path) -> Path:
    """Copy a tokenizer and give it the template."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "chat_template": TEMPLATE}, indent=2), encoding="utf-8")
    return folder


def nemotron3(*words: object) -> None:
    """Run a command of the package; a failure ends the script."""
    from megatron_nemotron3 import cli

    print("$ nemotron3", *words, flush=True)
    if status := cli.main([str(word) for word in words]):
        sys.exit(status)


def main(hf: str, tokenizer: str, out: str = "runs/sft") -> None:
    """Convert, measure, fine-tune, measure."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = write_conversations(folder)
    chat = tokenizer_with_template(Path(tokenizer), folder / "tokenizer")
    before = folder / "before"
    if not before.exists():
        nemotron3("convert", "from-hf", hf, before)
    measure = ("--conversations", held_out, "--tokenizer", chat)
    nemotron3("evaluate", "--checkpoint", before, *measure)
    data = ("--conversations", train, "--tokenizer", chat, "--pretrained", before)
    schedule = ("--steps", STEPS, "--seq-length", 512, "--lr", "1e-3")
    nemotron3("train", "super", "--tiny", *data, "--output", folder / "run", *schedule)
    nemotron3("evaluate", "--checkpoint", folder / "run", *measure)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    main(*sys.argv[1:])
