#!/usr/bin/env python3
"""Write conversations and a chat template for `nemotron3 finetune` (docs/training.md).

    python examples/conversations.py FOLDER

The conversations ask what functions of Python's standard library do, and the assistant answers with the first
lines of their documentation. FOLDER gets chats.jsonl and template.jinja.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path

MODULES = """
    argparse ast asyncio base64 calendar collections configparser csv datetime decimal difflib email.message
    fractions functools glob gzip heapq html http.client inspect io ipaddress itertools json logging math
    multiprocessing operator os os.path pathlib pickle platform queue random re shlex shutil socket sqlite3
    statistics string struct subprocess sys tarfile tempfile textwrap threading time tokenize types typing
    unittest urllib.parse urllib.request uuid warnings weakref xml.dom zipfile zlib
"""
#: The template of the conversations: plain words, so that the vocabulary stays as it is. The end token behind
#: an answer is what the model learns to stop by.
TEMPLATE = (
    "{% for m in messages %}{{ 'Question: ' if m.role == 'user' else 'Answer: ' }}{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}Answer: {% endif %}"
)


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


def main(folder: str) -> None:
    """Write both files."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(conversation) for conversation in questions().values()]
    (out / "chats.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (out / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    print(f"{out / 'chats.jsonl'}: {len(lines)} conversations")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
