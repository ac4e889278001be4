"""Content policies: judge prompts before they are computed, and answers before they leave."""
