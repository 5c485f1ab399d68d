"""Conversations as tokens and marks, and rows of them: against transformers and against their definition."""

from __future__ import annotations

import json
import os
import random
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_nemotron3.common.switches import CONVERSATIONS, SFT_MEAN
from megatron_nemotron3.train.data import forms, packing, train_tokenizer, workers
from megatron_nemotron3.train.data.chat_template import ChatTemplate
from megatron_nemotron3.train.data.conversations import Conversation, Encoder, Reading, read_conversations
from megatron_nemotron3.train.data.forms import LINE, Findings, read_rows
from megatron_nemotron3.train.data.packing import PackedConversations, first_fit
from megatron_nemotron3.train.inputs import mean, reading, variables_of
from tests.post_training.xtoken.tokenizers_of import sentence_piece

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
#: The same, with the marks of transformers.
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>\n{% endgeneration %}{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
#: Prompts begin a thought; turns hold an empty one, and history none, as in templates of reasoning models.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
)


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_tokenizer(folder: Path, template: str | None = TURNS) -> Path:
    """A small tokenizer with a chat template."""
    words = " ".join(f"<|user|> <|assistant|> <|system|> <|end|> {i} apples and pears" for i in range(40))
    train_tokenizer([words], 320, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config if template is None else {**config, "chat_template": template}))
    return folder


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


CHAT = [
    say("user", "2 apples?"),
    say("assistant", "yes, 2"),
    say("user", "and pears"),
    say("assistant", "3 pears"),
]


@pytest.mark.parametrize("template", [TURNS, MARKED])
def test_the_assistants_tokens_are_trained(tmp_path: Path, template: str) -> None:
    encoder = Encoder(write_tokenizer(tmp_path / "t", template))
    (chat,) = read_conversations(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}]))
    found = encoder.encode(chat)
    assert found.ids == encoder.tokenizer.apply_chat_template(CHAT)["input_ids"]
    said = [i for i, mine in zip(found.ids, found.trained, strict=True) if mine]
    assert encoder.tokenizer.decode(said) == "yes, 2<|end|>\n3 pears<|end|>\n"


def test_the_prompt_of_a_thought(tmp_path: Path) -> None:
    """The prompt ends in `<think>` and a new line, the turn has `<think></think>`."""
    encoder = Encoder(write_tokenizer(tmp_path / "t", THINKING))
    (chat,) = read_conversations(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT[:2]}]))
    found = encoder.encode(chat)
    said = encoder.tokenizer.decode([i for i, mine in zip(found.ids, found.trained) if mine])
    assert said == "<think></think>yes, 2<|end|>\n"
    (chat,) = read_conversations(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}]))
    text, spans = encoder.text(chat)
    assert [text[start:end] for start, end in spans] == ["yes, 2<|end|>\n", "<think></think>3 pears<|end|>\n"]
    with pytest.raises(ValueError, match="has no chat template"):
        Encoder(write_tokenizer(tmp_path / "none", None))


#: As templates of Nemotron 3: thoughts of earlier turns are dropped, and prompts begin a thought.
FAMILY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% set drop = truncate_history_thinking if truncate_history_thinking is defined else True %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n[[{% set c = m.content %}"
    "{% if m.reasoning_content %}{% set c = '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' ~ c %}"
    "{% elif '</think>' not in c %}{% set c = '<think></think>' ~ c %}{% endif %}"
    "{% if drop and loop.index0 < ns.last %}{% set c = '<think></think>' ~ c.split('</think>')[-1] %}"
    "{% endif %}"
    "{{ c | trim }}{% for t in m.tool_calls or [] %}<tool_call>{{ t.function.name }}"
    "{% for k, v in t.function.arguments|items %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}<|im_end|>\n]]"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# tools #}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Oslo"}'}}
TOLD = [
    say("user", "2 apples?"),
    {**say("assistant", "4 pears"), "reasoning_content": "2 and 2"},
    say("user", "rain?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "light"},
    say("assistant", "<think>\nlight\n</think>\nyes"),
]
AS_OBJECT = {**CALL, "function": {"name": "rain", "arguments": {"city": "Oslo"}}}
EXPECTED = [*TOLD[:3], {**TOLD[3], "content": "", "tool_calls": [AS_OBJECT]}, *TOLD[4:]]
ASKED = [say("user", "2 apples?"), say("assistant", "yes")]
PARTS = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in ASKED]
SHAREGPT = [{"from": "human", "value": "2 apples?"}, {"from": "gpt", "value": "yes"}]
#: A row, its messages as transformers takes them, and the assistant's that are trained.
FORMS_OF_ROWS = [
    ({"messages": TOLD, "tools": [{"type": "function"}]}, EXPECTED, None),
    ({"messages": PARTS}, ASKED, None),
    ({"conversations": SHAREGPT, "id": 3}, ASKED, None),
    ({"instruction": "2", "input": "apples?", "output": "yes"}, [say("user", "2\napples?"), ASKED[1]], None),
    ({"prompt": "2 apples?", "completion": "yes"}, ASKED, None),
    ({"prompt": CHAT[:3], "completion": CHAT[3:]}, CHAT, [1]),
    ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]}, CHAT, [1]),
    ({"messages": [{**one, "role": one["role"].title()} for one in ASKED]}, ASKED, None),
    ({"system": "4", "messages": ASKED}, [say("system", "4"), *ASKED], None),
    ({"system": "4", "input": CHAT[:3], "output": "3 pears"}, [say("system", "4"), *CHAT], [1]),
    ({"messages": TOLD, "chat_template_kwargs": {"truncate_history_thinking": False}}, EXPECTED, None),
]


@pytest.mark.parametrize("as_list", [False, True])
def test_every_form_has_the_mask_of_transformers(tmp_path: Path, as_list: bool) -> None:
    """The mask of the same template, marked by hand; without the messages of weight 0."""
    special = ["<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    train_tokenizer(
        ["2 apples? 4 pears yes rain Oslo assistant user " * 9], 330, tmp_path / "t", special=special
    )
    encoder = Encoder(_with(tmp_path / "t", FAMILY.replace("[[", "").replace("]]", "")))
    marked = FAMILY.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")
    of_marks = Encoder(_with(tmp_path / "t", marked))
    path = tmp_path / "c.json"
    if as_list:
        path.write_text(json.dumps([row for row, _, _ in FORMS_OF_ROWS], indent=1), "utf-8-sig")
    else:
        write_lines(path, [row for row, _, _ in FORMS_OF_ROWS])
    findings = Findings()
    found = list(read_conversations(path, findings=findings))
    for chat, (row, messages, kept) in zip(found, FORMS_OF_ROWS, strict=True):
        expected = of_marks.tokenizer.apply_chat_template(
            messages,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **row.get("chat_template_kwargs", {}),
        )
        for one in (encoder, of_marks):
            encoded = one.encode(chat)
            assert encoded.ids == expected["input_ids"]
            mask = expected["assistant_masks"]
            turns = [list(turn) for _, turn in groupby(range(len(mask)), mask.__getitem__)]
            turns = [turn for turn in turns if mask[turn[0]]]
            wanted = {i for n, turn in enumerate(turns) if kept is None or n in kept for i in turn}
            assert {i for i, mine in enumerate(encoded.trained) if mine} == wanted
    assert any("leaves reasoning out" in remark for remark, _ in encoder.encode(found[0]).remarks)
    assert not encoder.encode(found[-1]).remarks
    assert findings.lines("c")[1:] == [f"c: field 'id' is not used (1 time, first {found[2].place})"]


@pytest.mark.parametrize("ends", ["trim", "trim(' \n')"])
def test_a_block_that_is_trimmed_has_the_mask_of_transformers(ends: str, tmp_path: Path) -> None:
    marked = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}"
    )
    plain = marked.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    block = "{% set all %} \n" + plain + " \n {% endset %}{{ all | " + ends + " }}"
    block += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    train_tokenizer(["apples pears"], 300, tmp_path / "t", special=["<|im_start|>", "<|im_end|>"])
    expected = Encoder(_with(tmp_path / "t", marked)).tokenizer.apply_chat_template(
        CHAT, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = Encoder(_with(tmp_path / "t", block)).encode(Conversation(CHAT, None, "c", 0))
    assert encoded.ids == expected["input_ids"] and not encoded.remarks
    assert [int(one) for one in encoded.trained] == expected["assistant_masks"]
    changed = block.replace("all | " + ends, "all | trim | upper")
    with pytest.raises(ValueError, match="c: the chat template: it changes what it wrote .* filter trim"):
        Encoder(_with(tmp_path / "t", changed)).encode(Conversation(CHAT, None, "c", 0))


def test_ids_of_sentence_piece_are_those_of_a_prompt_and_its_answer(tmp_path: Path) -> None:
    """It writes a space before a text: once, at its begin, and before no answer."""
    turns = "{% for m in messages %}[{{ m.role }}] {{ m.content }}.\n{% endfor %}"
    turns += "{% if add_generation_prompt %}[assistant] {% endif %}"
    encoder = Encoder(_with(sentence_piece(tmp_path / "t"), turns))
    chat = [say("user", "There were 20 cats"), say("assistant", "of cats 201"), *CHAT[2:]]
    encoded = encoder.encode(Conversation(chat, None, "c", 0))
    prompt = encoder.prompt(Conversation(chat[:1], None, "c", 0))
    begun = encoded.trained.index(True)
    assert encoded.ids[:begun] == encoder.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answers = [one for one, mine in zip(encoded.ids, encoded.trained) if mine]
    assert encoder.tokenizer.decode(encoded.ids) == encoder.text(Conversation(chat, None, "c", 0))[0]
    assert encoder.tokenizer.decode([encoded.ids[0], *answers]) == "of cats 201.\n3 pears.\n"


def _with(folder: Path, template: str) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    return folder


def test_a_token_over_the_border_of_an_answer(tmp_path: Path) -> None:
    """All of the answer is trained, and the ids are those of a prompt and of its answer."""
    encoder = Encoder(write_tokenizer(tmp_path / "t", TURNS.replace("|>\n", "|> ")))
    line = {"messages": [*CHAT[:1], say("assistant", "pears")]}
    (chat,) = read_conversations(write_lines(tmp_path / "c.jsonl", [line]))
    found, ids = encoder.encode(chat), encoder.tokenizer
    prompt = ids(encoder.prompt(replace(chat, messages=chat.messages[:1])))["input_ids"]
    assert found.ids[: found.trained.index(True)] == prompt
    assert ids.decode([i for i, mine in zip(found.ids, found.trained) if mine]).startswith("pears")
    assert found.remarks and "went over the border" in found.remarks[0][0]


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ 'a' * 10 ** 10 }}", CHAT, "needs more than"),
        ("{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}", CHAT, "writes more than"),
        pytest.param(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            CHAT,
            "takes more",
            marks=pytest.mark.full,
        ),
        (TURNS, [say("system", "a")] * 10**5, "100,000 messages, more than 10,000"),
        (TURNS, [say("user", "half \ud800")], "c.jsonl:1: \\ud800 is half of a character"),
    ],
)  # fmt: skip
def test_hostile_rows_and_templates_end(tmp_path: Path, template: str, messages: Any, reason: str) -> None:
    encoder = Encoder(write_tokenizer(tmp_path / "t", template))
    path = write_lines(tmp_path / "c.jsonl", [{"messages": messages}])
    with pytest.raises(ValueError) as raised:
        [encoder.encode(one) for one in read_conversations(path)]
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_a_library_that_ends_and_a_long_template_are_said(tmp_path: Path) -> None:
    """A pattern that goes back too often makes the library in Rust raise what is no Exception."""

    class PanicException(BaseException):
        pass

    def encode(texts: list[str], add_special_tokens: bool) -> None:
        raise PanicException("retry-limit-in-match over")

    encoder = Encoder(write_tokenizer(tmp_path / "t"))
    library = SimpleNamespace(backend_tokenizer=SimpleNamespace(encode_batch_fast=encode))
    encoder.tokenizer = library
    given = Conversation([say("user", "a"), say("assistant", "b")], None, "x:1")
    with pytest.raises(ValueError, match="x:1: the tokenizer ends at this text: retry-limit-in-match over"):
        encoder.encode(given)
    with pytest.raises(ValueError, match="the chat template has 1,048,577 characters, more than 1,048,576"):
        ChatTemplate("a" * ((1 << 20) + 1), {})


def test_system_messages_begin_conversations(tmp_path: Path) -> None:
    lines = [{"messages": [say("system", "a"), *CHAT, say("system", "b"), *CHAT]}, {"messages": CHAT}]
    findings = Findings()
    found = list(read_conversations(write_lines(tmp_path / "c.jsonl", lines), findings=findings))
    assert [*findings.remarks] == ["a system message in a row begins another conversation"]
    assert [len(one.messages) for one in found] == [5, 5, 4]
    assert [one.place[-2:] for one in found] == [":1", ":1", ":2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "c.jsonl:2: not JSON"),
        ("[]", 'c.jsonl:2: give an object with a list "messages"'),
        ('{"messages": []}', 'c.jsonl:2: give an object with a list "messages"'),
        ('{"messages": [{"content": "x"}]}', 'c.jsonl:2: every message is an object with "role"'),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    with pytest.raises(ValueError) as raised:
        list(read_conversations(path))
    assert message in str(raised.value)


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_a_list_is_read_in_pieces_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Pieces end inside of numbers, escapes, literals and characters of several bytes."""
    monkeypatch.setattr(forms, "_BLOCK", block)
    rows = [
        {"a": ['\u00e9\U0001f34e\\"]', -1.5e-300, True, None, {"b": "]}," * 9}]},
        {},
        {"c": -float("inf")},
    ]
    path = tmp_path / "c.json"
    for ascii_only, indent in ((True, None), (False, 1)):
        path.write_text(json.dumps(rows * 3, ensure_ascii=ascii_only, indent=indent) + "\n", "utf-8-sig")
        found = list(read_rows(path))
        assert [json.loads(row.line) for row in found] == rows * 3
        lines = path.read_text("utf-8-sig").splitlines()
        places = [int(row.place.removeprefix(f"{path}:")) for row in found]
        assert indent is None or all(lines[at - 1].startswith(" {") for at in places) and places[0] == 2


def test_a_list_takes_the_memory_of_a_row(tmp_path: Path) -> None:
    """32 rows of 1 MiB."""
    path = tmp_path / "c.json"
    path.write_text(json.dumps([{"prompt": "x" * (1 << 20), "completion": "y"}] * 32))
    tracemalloc.start()
    assert sum(len(row.line) > 1 << 20 for row in read_rows(path)) == 32
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"a": 1},\n {"b":\n\n\'c\'}' + " " * 99, "c.json:4: not JSON: Expecting value"),
        ('[{"a": 1},\n{"b": "c', "c.json:2: not JSON: Unterminated string"),
        ('[{"a": 1}\n', "c.json:1: not JSON: no comma or ] behind the row"),
        ("[\n" + "[" * 10**6, "c.json:2: not JSON: "),
        ('[\n{"a": "' + "x" * (LINE + 9) + '"}]', f"c.json:2: the row has more than {LINE:,} bytes"),
        ('[{"a": "\xe9"}]', "c.json: not JSON in UTF-8: "),
    ],
)
def test_wrong_lists_are_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text, "latin-1")
    with pytest.raises(ValueError) as raised:
        for row in read_rows(path):
            if len(row.line) > LINE:
                list(read_conversations(path))
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_rows_of_datasets_are_read_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library in the place of `datasets` writes rows, then takes what a page of Parquet may hold."""

    def load_dataset(kind: str, data_files: list[str], **how: Any) -> Iterator[dict[str, Any]]:
        yield from ({"prompt": f"{i} é", "completion": "b" * i, "system": None} for i in range(100))
        if (more := Path(data_files[0]).read_bytes()[4:]).isdigit():
            yield {"prompt": "x" * int(more)}
        raise RuntimeError("of the file:\nit ends")

    path = tmp_path / "c.parquet"
    fake = SimpleNamespace(__version__="5.2.0", load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(set_cpu_count=id))  # type: ignore[arg-type]
    monkeypatch.setattr(forms, "_MEMORY", 128 << 20)
    monkeypatch.setattr(forms, "_BLOCK", 1 << 10)
    for rest, reason in (
        ("", "datasets: of the file: it ends"),
        (str(1 << 30), "reading the rows behind row 9"),
    ):
        path.write_bytes(b"PAR1" + rest.encode())
        rows: list[Any] = []
        with pytest.raises(ValueError) as raised:
            for one in read_conversations(path):
                rows.append(one)
        assert f"{path}: {reason}" in str(raised.value)
        assert [one.messages[0]["content"] for one in rows] == [f"{i} é" for i in range(len(rows))]
        assert rows[-1].place == f"{path}:{len(rows)}"
    assert str(raised.value).endswith(
        "needs more than 128 MiB of memory: write it with smaller row groups, or as JSON lines"
    )


def test_nothing_behind_a_list_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text((json.dumps([{"messages": CHAT}]) + "\n") * 2)
    with pytest.raises(ValueError, match="c.json:2: there is more behind the list"):
        list(read_conversations(path))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (TURNS.replace("<|end|>", "{% for n in messages %}{{ n.role | length }}{% endfor %}<|end|>"), ""),
        (TURNS.partition("{% if add")[0], "prompts do not begin an answer"),
        (
            TURNS.replace("<|end|>\n", "{{ '' if loop.last else '<|end|>' }}"),
            "the turn of an answer has no end",
        ),
    ],
)
def test_where_turns_begin_and_end(tmp_path: Path, template: str, said: str) -> None:
    """A loop inside a turn does not end it; what a template does not tell is said."""
    encoder = Encoder(write_tokenizer(tmp_path / "t", template))
    (chat,) = read_conversations(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}]))
    text, spans = encoder.text(chat)
    assert {remark.partition(",")[0] for remark, _ in encoder.encode(chat).remarks} == {said} - {""}
    assert said or [text[start:end] for start, end in spans][1].startswith("3 pears")
    assert said or all(text[start:end].endswith("<|end|>\n") for start, end in spans)


def test_what_is_not_trained_is_said_within_limits(tmp_path: Path) -> None:
    lines: list[Any] = [{"messages": CHAT, f"{i} " * 999: 1} for i in range(40)]
    lines.append({"messages": [*CHAT, say("bard", "x")]})
    findings = Findings()
    list(read_conversations(write_lines(tmp_path / "c.jsonl", lines), findings=findings))
    said = findings.lines("c")
    assert "c: an unknown role is only given to the chat template, and not trained (1 time, " in said[-1]
    assert len(said) == 23 and max(map(len, said)) < 999 and "(20 times, first " in said[-2]
    assert said[-1].endswith("first 'bard' in " + str(tmp_path / "c.jsonl:41") + ")")


def test_halves_of_characters_in_bytes(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"prompt": "half \xed\xa0\x80", "completion": "x"}\n')
    with pytest.raises(ValueError, match=r"c.jsonl:1: \\ud800 is half of a character"):
        list(read_conversations(path))


def test_a_missing_file_of_a_folder_is_no_data_set_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        list(read_conversations("data/chats"))


@pytest.mark.parametrize("wrong", ["", "row", "template", "both"])
def test_several_processes_encode_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tokens, marks, origins, what is said, and which of two errors is raised; both are behind the start."""
    monkeypatch.setattr(workers, "_ALONE", 3)
    lines: list[Any] = [
        {"messages": [say("user", "2 apples? " * i), *CHAT[1:], *CHAT], "x": 1} for i in range(70)
    ]
    lines[20]["tools"], lines[25]["y"] = [{}], 2  # said of what is encoded, and of a row that is read before
    if wrong in ("template", "both"):
        lines[37]["messages"][0]["content"] = "refused"
    if wrong in ("row", "both"):
        lines[40] = {"messages": []}
    path = write_lines(tmp_path / "c.jsonl", lines)
    template = TURNS + "{% if messages[0].content == 'refused' %}{{ 1 // 0 }}{% endif %}"
    folder = write_tokenizer(tmp_path / "t", template.replace("|>\n", "|> "))

    def written(cores: int) -> tuple[list[bytes], str]:
        monkeypatch.setattr(workers, "cores", lambda: cores)
        try:
            found = PackedConversations(str(path), str(folder), 4096, cache=str(tmp_path / f"of_{cores}"))
        except ValueError as problem:
            return [], str(problem)
        return [(found.folder / name).read_bytes() for name in packing._NAMES], ""

    expected = written(1)
    assert written(2) == expected
    assert bool(expected[0]) == (not wrong)
    assert {"": "", "row": ":41: ", "template": ":38: ", "both": ":38: "}[wrong] in expected[1]
    assert "fork" not in capfd.readouterr().err


def test_ranks_that_encode_at_once_do_not_take_arrays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one ends while others read what the first one wrote."""
    path = write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}] * 3)
    tokenizer, encode = str(write_tokenizer(tmp_path / "t", TURNS)), packing.encoded_conversations
    first: list[PackedConversations] = []

    def slowly(*given: Any) -> Any:
        monkeypatch.setattr(packing, "encoded_conversations", encode)
        first.append(PackedConversations(str(path), tokenizer, 256))
        yield from encode(*given)

    monkeypatch.setattr(packing, "encoded_conversations", slowly)
    kept: list[Any] = []
    replace = packing.os.rename
    monkeypatch.setattr(packing.os, "rename", lambda a, b: (replace(a, b), kept.append(b))[1])
    second = PackedConversations(str(path), tokenizer, 256)
    assert second.folder == first[0].folder and second.tokens == first[0].tokens
    assert kept == [first[0].folder]
    assert sorted(p.name for p in second.folder.iterdir()) == sorted(packing._NAMES)
    assert [p.name for p in second.folder.parent.iterdir()] == [second.folder.name]


@pytest.mark.parametrize("name", ["enable_thinkin", "nable_thinking", "thinking"])
def test_a_part_of_the_name_of_a_variable_is_none(name: str, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "t", TURNS + "{% if enable_thinking %} {% endif %}")
    Encoder(folder, variables='{"enable_thinking": true}')
    with pytest.raises(
        ValueError, match=f"^--chat-template-kwargs: the template of .* does not use {name}: "
    ):
        Encoder(folder, variables=json.dumps({name: True}))
    row = {"messages": [say("user", "4 apples?"), say("assistant", "yes")], "chat_template_kwargs": {name: 1}}
    (one,) = read_conversations(write_lines(tmp_path / "c.jsonl", [row]))
    (remark,) = Encoder(folder).encode(one).remarks
    assert remark[0] == "the chat template does not use a variable of chat_template_kwargs"


def test_the_environment_counts_where_no_option_says_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(form: str | None = None, variables: str | None = None) -> Any:
        names = {"format": form, "chat_template_kwargs": variables}
        return SimpleNamespace(conversations=["c.jsonl"], mean=None, **names)

    assert reading(options()) == Reading()
    assert reading(options("prompt")) == Reading("prompt")
    monkeypatch.setenv(CONVERSATIONS, '["alpaca", "{\\"a\\": 1}"]')
    both = Reading("alpaca", '{"a": 1}')
    assert reading(options()) == reading(options("alpaca", '{"a":1}')) == both
    assert variables_of(options())[CONVERSATIONS] == both.text()
    for given, said in (("prompt", "--format prompt"), ("", "neither --format nor --chat-template-kwargs")):
        with pytest.raises(ValueError) as raised:
            reading(options(given))
        assert str(raised.value) == (
            f"{CONVERSATIONS}={both.text()} is set, and given is {said}: unset it or give the same"
        )
    for wrong in ("[1, 2]", "5", "{"):
        monkeypatch.setenv(CONVERSATIONS, wrong)
        with pytest.raises(ValueError, match="^[^\n]*: give [^\n]*$"):
            reading(options())


def test_the_mean_of_the_environment_counts_where_no_option_says_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def found(given: str | None) -> str:
        return mean(SimpleNamespace(mean=given))

    monkeypatch.delenv(SFT_MEAN, raising=False)
    assert (found(None), found("conversations")) == ("tokens", "conversations")
    monkeypatch.setenv(SFT_MEAN, "conversations")
    assert found(None) == found("conversations") == "conversations"
    with pytest.raises(ValueError, match="SFT_MEAN=conversations is set, and given is --mean tokens: unset"):
        found("tokens")
    monkeypatch.setenv(SFT_MEAN, "rows")
    with pytest.raises(ValueError, match="SFT_MEAN='rows': use tokens or conversations"):
        found(None)


def test_first_fit() -> None:
    """Against a search through all bins."""
    generator = random.Random(1)
    for n in (0, 1, 2, 3, 50, 300):
        lengths = [generator.randint(1, 40) for _ in range(n)]
        expected: list[list[int]] = []
        for index, length in enumerate(lengths):
            fitting = (b for b in expected if sum(lengths[i] for i in b) + length <= 64)
            if (found := next(fitting, None)) is None:
                expected.append(found := [])
            found.append(index)
        assert first_fit(lengths, 64) == expected
    with pytest.raises(ValueError, match="a length of 65 does not fit 64"):
        first_fit([3, 65], 64)


def test_rows(tmp_path: Path) -> None:
    """Every conversation is whole and in one row; labels stay inside it; only the assistant counts."""
    generator = random.Random(2)
    chats = []
    for i in range(40):
        asked, answered = generator.randint(1, 9), generator.randint(1, 9)
        chats.append([say("user", "apples " * asked), say("assistant", f"{i} pears " * answered)])
    chats.append([say("user", "only a question")])
    chats.append([say("user", "long"), say("assistant", "apples and pears " * 99)])
    path = write_lines(tmp_path / "c.jsonl", [{"messages": chat} for chat in chats])
    folder = str(write_tokenizer(tmp_path / "t"))
    packed = PackedConversations(str(path), folder, 256, 4)
    assert (packed.conversations, packed.too_long, packed.untrained) == (40, 1, 1)
    encoder = Encoder(folder)
    expected = {}
    for chat in list(read_conversations(path))[:40]:
        encoded = encoder.encode(chat)
        expected[tuple(encoded.ids)] = encoded.trained
    for index in range(len(packed)):
        row = packed.row(index)
        assert row.borders[0] == 0 and row.borders[-1] == 256
        for start, end in zip(row.borders[:-1], row.borders[1:]):
            real = ~row.padding[start:end]
            assert real.tolist() == sorted(real.tolist(), reverse=True), "padding only at the end"
            ids = tuple(row.tokens[start:end][real].tolist())
            assert (row.tokens[start:end][~real] == 0).all()
            assert row.positions[start:end].tolist() == list(range(end - start))
            counted = row.loss_mask[start:end].tolist()
            if not ids:
                assert end == 256 and not any(counted)
                continue
            assert (end - start) % 4 == 0
            trained = expected.pop(ids)
            assert counted == [*map(float, trained[1:]), *[0.0] * (end - start - len(ids) + 1)]
            assert row.labels[start:end].tolist() == [*ids[1:], *[0] * (end - start - len(ids) + 1)]
    assert not expected, "every conversation once"


def test_arrays_are_kept_until_file_or_tokenizer_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}])
    folder = write_tokenizer(tmp_path / "t")

    def tokens() -> int:
        return PackedConversations(str(path), str(folder), 256, cache=str(tmp_path / "k")).tokens

    first = tokens()
    with monkeypatch.context() as patch:
        patch.setattr("megatron_nemotron3.train.data.packing.Encoder", None)
        assert tokens() == first
    write_lines(path, [{"messages": CHAT}, {"messages": CHAT}])
    assert tokens() == 2 * first
    before, arrays = path.stat(), sorted((tmp_path / "k").iterdir())
    path.write_text(path.read_text().replace("apples", "pieces"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` leaves it
    assert path.stat().st_size == before.st_size and tokens()
    assert len(list((tmp_path / "k").iterdir())) == len(arrays) + 1
    write_tokenizer(folder, TURNS.replace("<|end|>", ""))
    assert tokens() < 2 * first


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}, {"messages": CHAT[:1]}])
    folder = str(write_tokenizer(tmp_path / "t"))
    with pytest.raises(ValueError, match="none of 2 conversations .* 1 are longer than 16 tokens, 1 have no"):
        PackedConversations(str(path), folder, 16)
