"""`nemotron3 plan boundary`."""

from __future__ import annotations

import json

import pytest

from megatron_nemotron3 import cli

PAIR = ["plan", "boundary", "--from", "tp=1,dp=4", "--to", "tp=4,dp=1"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(PAIR) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "encoder          dp=4: ranks 0-3, 4 data lanes\n"
        "language model   tp=4,offset=4: ranks 4-7, 1 data lane\n"
        "microbatch       4 samples of 256 rows of 5,376 bytes: 5,505,024 bytes\n"
        "\nforward, once: "
    )
    assert "crossing             5,505,024 bytes (bound 5,505,024) in 4 messages" in text


def test_the_way_back_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--backward", "--json", "--rows", "7,1,0,8", "--hidden", "5", "--dtype", "fp32"]
    assert cli.main([*PAIR, *options]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["direction"] == "backward" and about["rows"] == [7, 1, 0, 8]
    plan = about["plan"]
    assert plan["row_bytes"] == 20 and plan["crossing"] == plan["crossing_bound"] == 320
    assert plan["messages"][0] == {"from": 4, "to": 0, "rows": 4, "bytes": 80, "pieces": 1}
    assert len(plan["ranks"]) == 8


def test_offset_0_shares_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PAIR[:-1], "tp=4,offset=0"]) == 0
    text = capsys.readouterr().out
    assert "forward, copies: the modules share ranks" in text
    assert "language model   tp=4: ranks 0-3, 1 data lane" in text


def test_context_and_sequence_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--samples", "2", "--rows-per-sample", "10", "--hidden", "1"]
    words = ["plan", "boundary", "--from", "tp=2", "--to", "tp=2,cp=2,pp=3,sp", *options]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "language model   tp=2,cp=2,pp=3,offset=2,sp: ranks 2-13, 1 data lane, at stage 0 of 3" in text
    assert "sequences        16 positions, rows at the start" in text
    assert cli.main([*words, "--seq-length", "32", "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["seq_length"] == 32
    # Context rank 0 computes 0-7 (and 24-31), rank 1 computes 8-23; tensor ranks halve that.
    received = {rank["rank"]: rank["received"] for rank in about["plan"]["ranks"]}
    assert received == {0: 0, 1: 0, 2: 2 * 8 * 2, 3: 0, 4: 2 * 2 * 2, 5: 0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "tp=x", "--to", "dp=2"], "'tp=x' has no meaning: use tp=, cp=, pp=, dp=, offset= and sp"),
        (["--from", "cp=2", "--to", "dp=2"], "CP=2: say how its context ranks share the rows"),
        (["--from", "cp=2,share=half", "--to", "dp=2"], "share=half: use one of media, zigzag, contiguous"),
        (["--from", "dp=2", "--to", "dp=3", "--samples", "5"], "5 samples of a microbatch do not divide"),
        (["--from", "dp=2", "--to", "dp=2", "--rows", "1,,2"], "'' is not a number"),
        (["--from", "dp=2", "--to", "dp=2", "--rows", "1,-2"], "'-2' is not a number"),
        (["--from", "dp=2", "--to", "dp=2", "--rows", "1,2", "--samples", "2"], "leave out --samples"),
        (
            ["--from", "dp=2", "--to", "dp=2", "--rows-per-sample", "-1"],
            "--rows-per-sample -1: give 0 or more",
        ),
        (["--from", "dp=2", "--to", "dp=2", "--samples", "0"], "--samples 0: give 1 or more"),
        (["--from", "dp=2", "--to", "dp=2", "--hidden", "0"], "--hidden 0: give 1 or more"),
        (["--from", "dp=2", "--to", "dp=2", "--seq-length", "8"], "does not cut sequences: leave it out"),
        (["--from", "dp=2", "--to", "cp=2", "--seq-length", "300"], "a row at position"),
        (["--from", "dp=2", "--to", "cp=2", "--seq-length", "258"], "pad it to a multiple of 4"),
        (
            ["--from", "tp=2,sp", "--to", "dp=1", "--rows", "3"],
            "3 rows of a source lane do not divide among TP=2",
        ),
        (["--from", "dp=99999", "--to", "dp=2"], "99,999 ranks: use 16,384 at most"),
        (["--from", "dp=4097", "--to", "dp=4096"], "16,781,312 samples (DP=4097 and DP=4096): use 1,000,000"),
        (["--from", "dp=2", "--to", "dp=2", "--dtype", "fp64"], "invalid choice"),
        (["--to", "dp=2"], "required: --from"),
    ],
)
def test_wrong_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if message == "a row at position":
        words = [*words[:-1], "252"]
    try:
        status = cli.main(["plan", "boundary", *words])
    except SystemExit as end:
        status = int(end.code or 0)
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    assert message in printed.err and printed.err.count("\n") == 1
