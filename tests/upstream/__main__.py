"""Run Megatron's own unit tests of what we replace on a CPU, with the stock stack and with ours.

python -m tests.upstream --megatron-lm DIR     # writes tests/upstream/results/VERSION.json

DIR is a checkout of Megatron-LM; its megatron comes before the installed one. `python -m tests.docs.pages`
makes docs/reference/upstream_tests.md of the results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from megatron_nemotron3.common.ranks import free_port
from megatron_nemotron3.launch import versions
from tests.upstream.page import RESULTS

ROOT = Path(__file__).parents[2]
FILES = (
    *(
        "ssm/test_hybrid_block.py",
        "ssm/test_mamba_layer.py",
        "ssm/test_mamba_mixer.py",
        "ssm/test_mlp_layer.py",
    ),
    *("models/test_hybrid_model.py", "models/test_hybrid_moe_model.py"),
    *("transformer/moe/test_moe_layer.py", "transformer/moe/test_latent_moe_layer.py"),
    *("transformer/moe/test_routers.py", "transformer/moe/test_aux_loss.py"),
    *("transformer/moe/test_shared_experts.py", "transformer/test_multi_token_prediction.py"),
)
MODES = ("stock", "ours")
#: Longest run of one mode, in seconds.
_LIMIT = 1500


def run(checkout: Path, mode: str, files: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    """Return test -> (outcome, reason) of the test files with one of `MODES`.

    Raises:
        ValueError: pytest ended without results.
    """
    with tempfile.TemporaryDirectory() as folder:
        results, log = Path(folder, "results.json"), Path(folder, "log")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (checkout, ROOT, Path(__file__).parent))),
            "UPSTREAM_SPEC": mode,
            "UPSTREAM_RESULTS": str(results),
            "CUDA_VISIBLE_DEVICES": "",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        # Megatron's conftest.py builds kernels and downloads test data; its settings name a GPU cluster.
        words = ["-q", "--noconftest", "--continue-on-collection-errors", "-c", os.devnull, "--rootdir", "."]
        words += ["-p", "upstream_plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
        command = [sys.executable, "-m", "pytest", *words, *(f"tests/unit_tests/{name}" for name in files)]
        with log.open("w") as output:
            done = subprocess.run(
                command,
                cwd=checkout,
                env=environment,
                stdout=output,
                stderr=output,
                timeout=_LIMIT,
                check=False,
            )
        if done.returncode not in (0, 1) or not results.exists():  # 1: tests failed
            raise ValueError(f"{mode}: pytest ended with {done.returncode}:\n{log.read_text()[-2000:]}")
        found = json.loads(results.read_text())
    return {name.removeprefix("tests/unit_tests/"): tuple(value) for name, value in found.items()}


def version_of(checkout: Path) -> str:
    """Return the version of a checkout's megatron-core, such as "0.19.0".

    Raises:
        ValueError: the folder is not a checkout of Megatron-LM.
    """
    version = versions.version_in(checkout / "megatron" / "core")
    if not version or not (checkout / "tests" / "unit_tests").is_dir():
        raise ValueError(f"--megatron-lm {checkout}: not a checkout of Megatron-LM")
    return version


def revision_of(checkout: Path) -> str:
    """Return the commit of a checkout; "" if it has no repository."""
    if not (checkout / ".git").exists():
        return ""
    words = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(words, check=False, capture_output=True, text=True).stdout.strip()


def main(argv: list[str] | None = None) -> int:
    """Run both modes and write the results; exit status 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m tests.upstream", description=__doc__)
    parser.add_argument("--megatron-lm", type=Path, required=True, metavar="DIR")
    parser.add_argument("--revision", help="commit of DIR; default: as git says")
    parser.add_argument("--files", nargs="+", default=FILES, metavar="FILE", help="below tests/unit_tests")
    parser.add_argument("--output", type=Path, help="default: tests/upstream/results/VERSION.json")
    options = parser.parse_args(argv)
    checkout = options.megatron_lm.resolve()
    try:
        version = version_of(checkout)
        revision = options.revision or revision_of(checkout)
        if not revision:
            raise ValueError(f"{checkout} has no git repository: name its commit with --revision")
        files = tuple(name for name in options.files if (checkout / "tests/unit_tests" / name).exists())
        found = {mode: run(checkout, mode, files) for mode in MODES}
    except (ValueError, OSError, subprocess.TimeoutExpired) as problem:
        print(f"tests.upstream: {problem}", file=sys.stderr)
        return 2
    names = sorted({name for results in found.values() for name in results})
    tests = {name: [found[mode].get(name, ("absent", "")) for mode in MODES] for name in names}
    output = options.output or RESULTS / f"{version}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"version": version, "revision": revision, "tests": tests}, indent=0) + "\n")
    counts = {
        mode: sum(outcomes[at][0] == "passed" for outcomes in tests.values()) for at, mode in enumerate(MODES)
    }
    print(f"megatron-core {version}: {len(tests)} tests; passed: {counts}; {output} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
