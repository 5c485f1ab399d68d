#!/usr/bin/env bash
# Train tiny Nano on this machine's CPU, mock data, no GPU and no checkout needed. Variables: ../cpu/debug.sh.
set -euo pipefail

MODEL=nano exec bash "$(dirname "$0")/../cpu/debug.sh"
