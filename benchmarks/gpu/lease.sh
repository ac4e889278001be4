#!/usr/bin/env bash
# All stages on a GPU that is lent for some minutes at a time, in two calls of less than ten minutes each:
#     OUT=folder benchmarks/gpu/lease.sh 1     and     OUT=folder benchmarks/gpu/lease.sh 2
# Needs python3 with torch, triton and transformers, and nothing else. What `python -m benchmarks.gpu.carry pack` made
# may lie in .vllm/a for the first call and in .vllm/b for the second: where both parts came, vLLM runs as a peer.
# Findings are kept in $KEEP between the calls, as long as the machine lives, and copied to $OUT after each stage.
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
  cp "$KEEP/gpu.json" "$OUT/gpu.json"
}

unpack() {  # FOLDER
  if [ -d "$1" ]; then "$PYTHON" -m benchmarks.gpu.carry unpack "$1" --to "$VLLM"; fi
}

case "${1:-}" in
1)
  unpack .vllm/a &
  stage machine 45
  stage correctness 120
  stage attention 90
  stage serve 270
  wait
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
