#!/usr/bin/env bash
# Pre-train Nemotron 3 Nano 30B-A3B with its published schedule. DRY_RUN=1 prints the command only.
# Precision: the published model is BF16.
set -euo pipefail

# architecture: every number comes from the catalog (nemotron3 show nano)
MODEL=nano

# parallelism: the published launch is 3072 H100, TP2 EP32 PP1, MBS 1.
TP=${TP:-2}
EP=${EP:-32}

. "$(cd "$(dirname "$0")" && pwd)/../common.sh"
launch
