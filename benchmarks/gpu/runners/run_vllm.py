"""vLLM on token ids, with random weights of its own making.

python -m benchmarks.gpu.runners.run_vllm IDS.json --model FOLDER --options '{"max_num_seqs": 256, …}'

It makes small random weights itself ("dummy"): values as small as ours, but others, which speed doesn't depend on as
long as they are no zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm import LLM, SamplingParams

from benchmarks.peers.offline import Prompt, measure, parse_task


def main() -> None:
    task = parse_task(__doc__)
    llm = LLM(
        str(task.model), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
        max_model_len=task.longest + 1, **task.options,
    )  # fmt: skip

    def generate(prompts: Sequence[Prompt]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=prompt.max_tokens, ignore_eos=True, detokenize=False)
            for prompt in prompts
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt.token_ids} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    measure("vllm", ("vllm", "torch"), task, generate, lambda: None)


if __name__ == "__main__":
    main()
