#!/usr/bin/env bash
#
# All that only a GPU can tell of the kernels, in one command and under eight minutes: that they are right on it
# (the contract suite), that decode steps recorded as graphs draw what others draw, how fast the kernels are beside
# others (bench.kernels), and what a whole step costs (bench.graph_decode).
#
#   bench/gpu_check.sh [FOLDER]     results as JSON lines in FOLDER (default: gpu-check), and a short table
#
# PYTHON names the interpreter; it needs torch for this GPU, triton, pytest with pytest-xdist, hypothesis and, for the
# graphs, what `.[local]` installs. Parts that fail or take too long are said so in the table, the others still run; the
# exit status is 1 then.

set -uo pipefail
cd "$(dirname "$0")/.."

results=${1:-gpu-check}
python=${PYTHON:-python3}
processes=${PROCESSES:-8} # compiling a kernel takes longer than checking it, so the suite runs in several, side by side
export python processes

"$python" - <<'EOF' || exit 2
import sys, torch
if not torch.cuda.is_available():
    sys.exit("gpu_check: torch finds no CUDA device")
print("gpu_check:", torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
EOF

mkdir -p "$results"
rm -f "$results"/*.jsonl "$results"/*.log

# part NAME SECONDS COMMAND...: its JSON lines, its other output, and how it ended. No part runs beyond the deadline:
# those that took too long leave less to the last ones, and the table is there in time.
deadline=460
part() {
  local name=$1 seconds=$2 left=$((deadline - SECONDS)) began=$SECONDS status=0
  shift 2
  ((seconds < left)) || seconds=$left
  if ((seconds > 0)); then
    timeout --kill-after=5 "$seconds" "$@" >"$results/$name.jsonl" 2>"$results/$name.log" || status=$?
  else
    status=124
  fi
  printf '{"part": "%s", "status": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - began)) >>"$results/parts.jsonl"
}

part contract 200 bash -c '"$python" -m pytest -q -p no:cacheprovider --hypothesis-profile=gpu -n "$processes" \
  -k triton tests/contract/test_attention.py tests/unit/worker/test_block_ops_triton.py 1>&2'
part graphs 90 bash -c '"$python" -m pytest -q -p no:cacheprovider tests/unit/worker/test_graphs.py 1>&2'
part kernels 130 "$python" -m bench.kernels --seconds 1
part graph_decode 90 "$python" -m bench.graph_decode
"$python" -m bench.gpu_report "$results"
