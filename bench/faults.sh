#!/bin/bash
# Kills, stops and disturbs saves of checkpoints at every point, on all ranks, and restarts a run 200
# times after a SIGKILL: docs/reliability.md. Takes hours; arguments go to pytest (-k KILL-2, -n 8).
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m pytest -n "$(nproc)" --dist load --save-faults all \
  --exhaustive-faults test/parity/test_save_faults.py test/faults "$@"
