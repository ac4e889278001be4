"""transformers' continuous batching on token ids, with the same random weights as our engine.

python -m benchmarks.gpu.runners.run_transformers IDS.json --model FOLDER --options '{"device": "cuda", …}'

Without FlashAttention it attends through one dense mask over all requests of a step: a weak peer, and named as such.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from benchmarks.gpu.models import load_transformers
from benchmarks.peers.offline import Prompt, measure, parse_task

NO_TOKEN = -1  # an end token that is never made


def main() -> None:
    task = parse_task(__doc__)
    device = torch.device(task.options["device"])
    attention = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
    task.options["attention"] = attention
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_transformers(task.model, dtype, device, attention)
    generation = GenerationConfig(do_sample=False, eos_token_id=NO_TOKEN, pad_token_id=0, max_new_tokens=1)

    @torch.no_grad()
    def generate(prompts: Sequence[Prompt]) -> list[list[int]]:
        config = ContinuousBatchingConfig(**task.options.get("batching", {}))
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

    measure("transformers", ("transformers", "torch"), task, generate, lambda: None)


if __name__ == "__main__":
    main()
