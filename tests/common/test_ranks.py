"""The server that ranks are forked from: what they inherit, and from where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torch import cuda

from megatron_nemotron3.common.ranks import server
from megatron_nemotron3.proof.certify.ranks import PRELOAD
from tests.support.distributed import run_fresh

ROOT = Path(__file__).parents[2]


def test_ranks_inherit_what_is_imported_and_the_environment_stays() -> None:
    before = dict(os.environ)
    server(PRELOAD)
    assert dict(os.environ) == before
    imported, frozen = run_fresh(eval, "set(__import__('sys').modules), __import__('gc').get_freeze_count()")
    assert {*PRELOAD, "megatron.training"} - imported <= {"megatron.bridge"} and frozen > 100_000
    assert "torch._dynamo" in imported
    assert cuda.is_available() or "torch._inductor.compile_fx" not in imported
    assert run_fresh(eval, "__import__('os').environ.get('PYTHONSAFEPATH')") == before.get("PYTHONSAFEPATH")


def test_another_copy_in_the_working_directory_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "megatron_nemotron3").mkdir()
    (tmp_path / "megatron_nemotron3/__init__.py").write_text("raise SystemExit('the other copy')")
    script = tmp_path / "scripts/script.py"
    script.parent.mkdir()
    script.write_text(
        "if __name__ == '__main__':\n"
        "    from megatron_nemotron3.common.ranks import Call, run_ranks\n"
        "    call = Call(eval, (\"__import__('megatron_nemotron3').__file__\",))\n"
        "    print(*run_ranks(call, 1, timeout=60, preload=['megatron_nemotron3']))\n"  # light
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(ROOT / "megatron_nemotron3/__init__.py"), done.stderr
