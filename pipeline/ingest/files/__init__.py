"""Ingest of files that appear in a bucket or a folder."""
