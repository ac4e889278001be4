"""Content policies check prompts before they are computed, and answers before they leave the worker."""
