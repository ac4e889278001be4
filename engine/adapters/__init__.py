"""LoRA adapters over one model: their files, and the low-rank products that they add to the model's own."""
