#!/bin/bash
# Kills, stops and disturbs saves of checkpoints at every point, on all ranks, and restarts a run 200
# times after a SIGKILL: docs/reliability.md. Takes half an hour on 2 cores; arguments go to pytest
# (-k KILL-2, -n 8). Writes out/faults.xml and prints the tables of the documentation.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p out
rm -f out/faults.xml # of an earlier run
status=0
.venv/bin/python -m pytest -n "$(nproc)" --dist load --save-faults all --exhaustive-faults \
  --junitxml out/faults.xml test/parity/test_save_faults.py test/faults "$@" ||
  status=$?
.venv/bin/python bench/faults.py out/faults.xml
exit $status
