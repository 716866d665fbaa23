#!/usr/bin/env bash
# Everything that needs a GPU, on one of them, in under nine minutes: numbers of the kernels, their times, steps of models.
# Writes benchmarks/results/<gpu>-<date>.json and prints one table last. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1
parts="$(mktemp -d)"
trap 'rm -rf "$parts"' EXIT

"$python" -m pytest -q tests/test_kernels_gpu.py
timeout 270 "$python" benchmarks/kernels.py --json "$parts/kernels.json"
timeout 120 "$python" benchmarks/end_to_end.py --models flux wan-1.3b --json "$parts/steps.json"
timeout 120 "$python" benchmarks/end_to_end.py --models wan-14b --strategies reuse --steps 6 --runs 1 \
  --json "$parts/steps-14b.json" || echo "wan-14b did not finish" >&2
"$python" benchmarks/gpu_report.py "$parts"
