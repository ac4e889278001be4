"""OpenVINO GenAI's ContinuousBatchingPipeline on token ids, stepped by hand.

A prompt is looked up in the prefix cache when it is taken up, and only finished blocks are found: of prompts that come
together each computes the prefix they share. With the option `leaders` (tokens) one prompt of each group goes ahead;
the others follow when its first token is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai
from offline import Prompt, leaders, measure, parse_task


def generation_config(max_tokens: int) -> openvino_genai.GenerationConfig:
    """Greedy, end tokens ignored."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def main() -> None:
    task = parse_task(__doc__)
    scheduler = openvino_genai.SchedulerConfig()
    for name, value in task.options.get("scheduler", {}).items():
        setattr(scheduler, name, value)
    properties = {
        name: task.threads if value == "threads" else value for name, value in task.options.get("device", {}).items()
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(task.model), scheduler, "CPU", properties)
    block = int(task.options.get("leaders", 0))
    taken = 0

    def generate(prompts: Sequence[Prompt]) -> list[list[int]]:
        nonlocal taken
        handles: dict[int, openvino_genai.GenerationHandle] = {}

        def add(i: int) -> None:
            nonlocal taken
            ids = openvino.Tensor(np.array([prompts[i].token_ids], dtype=np.int64))
            handles[i] = pipeline.add_request(taken, ids, generation_config(prompts[i].max_tokens))
            taken += 1

        ahead = leaders(prompts, block) if block else []
        for i in ahead:
            add(i)
        while not all(handles[i].can_read() for i in ahead):
            pipeline.step()
        for i in range(len(prompts)):
            if i not in handles:
                add(i)
        while pipeline.has_non_finished_requests():
            pipeline.step()
        return [list(handles[i].read_all()[0].generated_ids) for i in range(len(prompts))]

    # There is no call that empties the prefix cache: the warm-up's salt is what keeps it from the timed pass.
    measure("openvino", ("openvino-genai", "openvino"), task, generate, lambda: None)


if __name__ == "__main__":
    main()
