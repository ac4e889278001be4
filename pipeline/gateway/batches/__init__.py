"""OpenAI batches: requests are checked, jobs are created, outputs are finalized."""
