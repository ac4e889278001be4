"""From OpenAI's bodies to the engine's requests, and from completions to responses."""
