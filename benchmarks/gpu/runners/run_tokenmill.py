"""Our engine on token ids, in a process of its own like every peer.

python -m benchmarks.gpu.runners.run_tokenmill IDS.json --model FOLDER --options '{"settings": {…}}'
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.engine_settings import with_overrides
from benchmarks.gpu.models import load_engine
from benchmarks.peers.offline import Prompt, measure, parse_task
from engine import EngineConfig, Request, SamplingParams, as_token_ids


def main() -> None:
    task = parse_task(__doc__)
    engine = load_engine(task.model, with_overrides(EngineConfig(), task.options["settings"]))
    passes = iter(range(2))

    def generate(prompts: Sequence[Prompt]) -> list[list[int]]:
        name = str(next(passes))
        requests = [
            Request(
                f"{name}-{i}",
                as_token_ids(prompt.token_ids),
                SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0, ignore_eos=True),
            )
            for i, prompt in enumerate(prompts)
        ]
        found = {}
        for completion in engine.run(requests):
            if completion.error is not None:
                raise SystemExit(f"{completion.request_id} failed: {completion.error}")
            found[completion.request_id] = completion.choices[0].token_ids.tolist()
        return [found[request.request_id] for request in requests]

    measure("tokenmill", ("torch",), task, generate, lambda: None)


if __name__ == "__main__":
    main()
