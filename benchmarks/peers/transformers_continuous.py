"""transformers' continuous batching, one manager a pass, so that no pass finds blocks of an earlier one.

On a CPU its attention gathers keys and values and builds a dense mask over all requests of a step: few requests a step
(`max_requests_per_batch`) waste less than many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from offline import Prompt, measure, parse_task
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

NO_TOKEN = -1  # an end token that is never made


def main() -> None:
    task = parse_task(__doc__)
    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.bfloat16).eval()
    generation = GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0, max_new_tokens=1)
    options = dict(task.options)
    if "pool_tokens" in options:
        options["num_blocks"] = -(-int(options.pop("pool_tokens")) // int(options.get("page_size", 256)))

    @torch.no_grad()
    def generate(prompts: Sequence[Prompt]) -> list[list[int]]:
        config = ContinuousBatchingConfig(**options)
        answers: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
            for i, prompt in enumerate(prompts):
                name = f"request-{i}"
                manager.add_request(prompt.token_ids, name, max_new_tokens=prompt.max_tokens, eos_token_id=NO_TOKEN)
            while len(answers) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise SystemExit(f"the generation thread ended after {len(answers)} of {len(prompts)} requests")
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise SystemExit(f"{result.request_id} failed: {result.error}")
                    answers[result.request_id] = list(result.generated_tokens)
        return [answers[f"request-{i}"] for i in range(len(prompts))]

    measure("transformers-continuous", ("transformers", "torch"), task, generate, lambda: None)


if __name__ == "__main__":
    main()
