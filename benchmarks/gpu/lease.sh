#!/usr/bin/env bash
# All stages on a GPU that is lent for some minutes at a time, in calls of less than five minutes each, the most wanted
# first:  OUT=folder benchmarks/gpu/lease.sh 1    and so on, to 5.
# Needs python3 with torch, triton and transformers, and nothing else. What `python -m benchmarks.gpu.carry pack` made
# may lie in .vllm/a for the first call, in .vllm/b for the second, …: once all parts came to the same machine, vLLM
# runs as a peer. $KEEP has the findings, as long as the machine lives: there the machine is measured once. They are
# copied to $OUT as they come, so a call that is killed leaves what it found until then.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT="${OUT:-out/gpu}"
KEEP="${KEEP:-/tmp/tokenmill-gpu}"
VLLM="$KEEP/vllm"
PYTHON="${PYTHON:-python3}"
OPTIONS=(--window 7 ${LEASE_OPTIONS:-})
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT" "$KEEP"

stage() {  # NAME SECONDS
  local started=$SECONDS
  "$PYTHON" -m benchmarks.gpu --stage "$1" --limit-seconds "$2" --out "$KEEP" "${OPTIONS[@]}" 2>&1 | tee "$OUT/$1.log"
  echo "== $1: $((SECONDS - started)) s, $SECONDS s since the call began"
}

copy_findings() {  # whole or not at all, whenever this ends
  [ -e "$KEEP/gpu.json" ] && cp "$KEEP/gpu.json" "$OUT/gpu.part" && mv "$OUT/gpu.part" "$OUT/gpu.json"
}

write_through() {  # every two seconds, or as EVERY says
  while sleep "${EVERY:-2}"; do copy_findings; done
}

unpack() {  # FOLDER
  if [ -d "$1" ]; then "$PYTHON" -m benchmarks.gpu.carry unpack "$1" --to "$VLLM"; fi
}

kernel_tests() {  # where pytest is installed; the CPU answers by torch's operators
  : >"$OUT/failed_tests.log"
  KERNEL_TESTS="$OUT/failed_tests.log" CXX=none OMP_NUM_THREADS=1 timeout 140 "$PYTHON" -m pytest tests/engine/triton -n 12 \
    -o addopts= --import-mode=importlib -q -p benchmarks.gpu.kernel_tests -p no:cacheprovider -p no:benchmark \
    --ignore tests/engine/triton/test_machine_code.py >"$OUT/kernel_tests.log" 2>&1
  tail -n 1 "$OUT/kernel_tests.log" | cut -c -160
  grep -E "^(FAILED|E  )" "$OUT/failed_tests.log" | cut -c -160 | head -n 60
}

case "${1:-}" in
[1-5]) part=".vllm/$(echo abcde | cut -c "$1")" ;;
*)
  echo "usage: OUT=folder $0 1|2|3|4|5" >&2
  exit 2
  ;;
esac
new_machine=true
[ -e "$KEEP/gpu.json" ] && new_machine=false
write_through &
writer=$!
trap 'kill "$writer"; copy_findings' EXIT
unpack "$part" &
unpacking=$!
if "$new_machine"; then
  stage machine 33
fi
wait "$unpacking"
case "$1" in
1)
  kernel_tests &
  tests=$!
  stage correctness 140
  wait "$tests"
  stage attention 57
  stage kernels 70
  ;;
2)
  stage serve 265
  ;;
3)
  stage published 150
  stage mixed 117
  ;;
4)
  if "$PYTHON" -m benchmarks.gpu.carry whole "$VLLM"; then
    OPTIONS+=(--vllm "$VLLM")
  else
    echo "== not all of vLLM's parts came to this machine: it is no peer"
  fi
  stage peers 265
  ;;
5)
  stage profile 95
  ;;
esac
