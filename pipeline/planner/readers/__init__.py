"""Readers of input files: JSONL and Parquet, in bounded memory."""
