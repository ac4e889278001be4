"""Where models are loaded from: a folder, a GGUF file, a bucket, a hub name, the demo model."""
