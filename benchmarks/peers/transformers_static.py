"""transformers' `generate` in static batches: padded on the left, each as long as its longest answer.

Tokens that a row makes beyond what it was asked for are cut off and not counted. With the option `sort`, requests with
answers of like length share a batch, which wastes least.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from offline import Prompt, measure, parse_task
from transformers import AutoModelForCausalLM, GenerationConfig


def main() -> None:
    task = parse_task(__doc__)
    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.bfloat16).eval()
    # What a call leaves unset is filled in from the model's own configuration: the end token has to go there too.
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    batch_size = int(task.options.get("batch_size", 32))

    def one_batch(prompts: Sequence[Prompt]) -> list[list[int]]:
        width = max(len(prompt.token_ids) for prompt in prompts)
        pads = [width - len(prompt.token_ids) for prompt in prompts]
        ids = torch.tensor([[0] * pad + prompt.token_ids for pad, prompt in zip(pads, prompts, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
        longest = max(prompt.max_tokens for prompt in prompts)
        output = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest)
        rows = output[:, width:].tolist()
        return [row[: prompt.max_tokens] for row, prompt in zip(rows, prompts, strict=True)]

    def generate(prompts: Sequence[Prompt]) -> list[list[int]]:
        order = list(range(len(prompts)))
        if task.options.get("sort"):
            order.sort(key=lambda i: (prompts[i].max_tokens, len(prompts[i].token_ids)), reverse=True)
        answers: list[list[int]] = [[] for _ in prompts]
        for begin in range(0, len(order), batch_size):
            batch = order[begin : begin + batch_size]
            for i, answer in zip(batch, one_batch([prompts[i] for i in batch]), strict=True):
                answers[i] = answer
        return answers

    measure("transformers-static", ("transformers", "torch"), task, generate, lambda: None)


if __name__ == "__main__":
    main()
