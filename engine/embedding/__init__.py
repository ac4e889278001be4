"""Embeddings of texts: the encoder engine, and the embedder over any engine that pools."""
