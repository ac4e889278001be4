"""Carries KV blocks from the worker that computed a prompt to the worker that goes on with the answer."""
