"""tokenmill's engine: one model in one process, token ids in, token ids out.

    from engine import Engine, EngineConfig, Request, SamplingParams, as_token_ids

    engine = Engine.load("path/to/model")
    request = Request("a", as_token_ids([1, 2, 3]), SamplingParams(max_tokens=8, temperature=0))
    for completion in engine.run([request]):
        print(completion.choices[0].token_ids)
"""
