#!/usr/bin/env bash
# Evaluates one model twice with lm-eval: served by `tokenmill serve`, and by transformers in lm-eval's own process.
#
#   examples/evaluation/run.sh MODEL_FOLDER [OPTIONS OF LM_EVAL]        from the repository's root
#
# TOKENMILL and LM_EVAL are the two commands, OUT the folder of the results, PORT the server's.
set -euo pipefail
model=$(realpath "$1")
shift
name=$(basename "$model")
tokenmill=${TOKENMILL:-tokenmill} lm_eval=${LM_EVAL:-lm_eval} out=${OUT:-out/evaluation} port=${PORT:-8017}
url=http://127.0.0.1:$port
# The items lie here, and so does the model: nothing is looked up elsewhere.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 TOKENIZERS_PARALLELISM=false
rm -rf "$out"
mkdir -p "$out"
evaluate=("$lm_eval" --include_path examples/evaluation --tasks tokenmill_choices,tokenmill_opposites)

$tokenmill serve --model "$name=$model" --dtype float32 --data "$out/data" --port "$port" 2>"$out/serve.log" &
server=$!
trap 'kill $server 2>/dev/null; wait $server || true' EXIT
curl --silent --fail --output /dev/null --retry 120 --retry-delay 1 --retry-all-errors "$url/readyz" ||
  { cat "$out/serve.log"; exit 1; }

served=base_url=$url/v1/completions,model=$name,tokenizer=$model
"${evaluate[@]}" --model local-completions --batch_size 8 --output_path "$out/served" "$@" \
  --model_args "$served,num_concurrent=2,tokenized_requests=True,max_retries=1"

"${evaluate[@]}" --model hf --batch_size 8 --device cpu --output_path "$out/transformers" "$@" \
  --model_args "pretrained=$model,dtype=float32"
