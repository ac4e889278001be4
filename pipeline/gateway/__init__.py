"""HTTP as OpenAI's clients speak it: files, batches, models, and requests whose callers wait."""
