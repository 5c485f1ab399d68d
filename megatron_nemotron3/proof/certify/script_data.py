"""What the script trains on: text, or conversations where the launch fine-tunes."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from megatron_nemotron3.train.data.indexed import write_dataset
from megatron_nemotron3.train.data.tokenizer import TokenizerInfo

_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
_MARKS = ("<unk>", "<pad>", "<user>", "<assistant>", "<end>")
_SPLIT = ("--split", "100,0,0")
#: Conversations or documents.
_COUNT = 200


def write_text(folder: Path, tokens: int, longest: int, blended: bool) -> list[str]:
    """Write documents of up to `longest` tokens; return the options that read them."""
    random, tokenizer = Random(0), TokenizerInfo("NullTokenizer", None, vocab_size=tokens, eod=tokens - 1)
    documents = (
        "".join(chr(random.randrange(tokens - 1)) for _ in range(random.randint(1, longest)))
        for _ in range(_COUNT)
    )
    write_dataset(documents, tokenizer, folder / "text")
    text = str(folder / "text")
    return ["--data-path", *(["1", text, "2", text] if blended else [text]), *_SPLIT, *tokenizer.flags]


def write_conversations(folder: Path, tokens: int, longest: int) -> list[str]:
    """Write conversations of up to `longest` tokens, and a tokenizer; return the options that read them.

    Their lengths are multiples of 8: what context parallelism pads would else go into other rows.
    """
    random, names = Random(0), [f"w{i}" for i in range(tokens - len(_MARKS))]

    def message(role: str, count: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(random.choices(names, k=count))}

    lines = []
    for _ in range(_COUNT):
        inside = 8 * random.randint(1, longest // 16) - 4  # without the marks of two messages
        question = random.randint(1, inside - 1)
        lines.append({"messages": [message("user", question), message("assistant", inside - question)]})
    file, tokenizer = folder / "conversations.jsonl", folder / "tokenizer"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = {
        "type": "WordLevel",
        "vocab": {word: i for i, word in enumerate((*_MARKS, *names))},
        "unk_token": "<unk>",
    }
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    split = {"type": "WhitespaceSplit"}
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": split, "model": model})
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<end>"},
        "chat_template": _TEMPLATE,
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    return [
        *("--data-path", str(file), *_SPLIT, "--tokenizer-type", "SFTTokenizer"),
        *("--tokenizer-model", str(tokenizer), "--sft-tokenizer-prompt-format", "default"),
    ]
