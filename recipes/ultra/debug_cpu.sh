#!/usr/bin/env bash
# Train tiny Ultra on this machine's CPU, mock data, no GPU and no checkout needed. Variables: ../cpu/debug.sh.
set -euo pipefail

MODEL=ultra exec bash "$(dirname "$0")/../cpu/debug.sh"
