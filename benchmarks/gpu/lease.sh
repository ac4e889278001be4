#!/usr/bin/env bash
# All stages on a GPU that is lent for some minutes at a time, in two calls of less than ten minutes each:
#     OUT=folder benchmarks/gpu/lease.sh 1     and     OUT=folder benchmarks/gpu/lease.sh 2
# Needs python3 with torch, triton and transformers, and nothing else. What `python -m benchmarks.gpu.carry pack` made
# may lie in .vllm/a for the first call and in .vllm/b for the second: where both parts came, vLLM runs as a peer.
# Findings are kept in $KEEP between the calls, as long as the machine lives, and copied to $OUT as they come.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT="${OUT:-out/gpu}"
KEEP="${KEEP:-/tmp/tokenmill-gpu}"
VLLM="$KEEP/vllm"
PYTHON="${PYTHON:-python3}"
OPTIONS=(${LEASE_OPTIONS:-})
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT" "$KEEP"

stage() {  # NAME SECONDS
  local started=$SECONDS
  "$PYTHON" -m benchmarks.gpu --stage "$1" --limit-seconds "$2" --out "$KEEP" "${OPTIONS[@]}" 2>&1 | tee "$OUT/$1.log"
  echo "== $1: $((SECONDS - started)) s, $SECONDS s since the call began"
}

write_through() {  # a call that is ended too early leaves what it found until then
  while sleep 2; do cp "$KEEP/gpu.json" "$OUT/gpu.json" 2>/dev/null; done
}

unpack() {  # FOLDER
  if [ -d "$1" ]; then "$PYTHON" -m benchmarks.gpu.carry unpack "$1" --to "$VLLM"; fi
}

kernel_tests() {  # where pytest is installed; the CPU answers by torch's operators
  CXX=none OMP_NUM_THREADS=1 timeout 160 "$PYTHON" -m pytest tests/engine/triton -n 12 -o addopts= --import-mode=importlib \
    -q -p no:cacheprovider --ignore tests/engine/triton/test_machine_code.py >"$OUT/kernel_tests.log" 2>&1
  tail -n 40 "$OUT/kernel_tests.log" | cut -c -160
}

write_through &
trap 'kill %1; cp "$KEEP/gpu.json" "$OUT/gpu.json"' EXIT
case "${1:-}" in
1)
  unpack .vllm/a &
  unpacking=$!
  stage machine 45
  kernel_tests &
  tests=$!
  stage correctness 160
  wait "$tests" "$unpacking"
  stage attention 60
  stage kernels 80
  stage serve 220
  ;;
2)
  unpack .vllm/b
  if "$PYTHON" -m benchmarks.gpu.carry whole "$VLLM"; then OPTIONS+=(--vllm "$VLLM"); fi
  stage machine 45
  stage profile 95
  stage mixed 150
  stage peers 260
  ;;
*)
  echo "usage: OUT=folder $0 1|2" >&2
  exit 2
  ;;
esac
