"""Speculative decoding: cheap drafts of the next tokens, which one step of the model then verifies all at once.

A draft changes when a token is known, never which one it is. Every position is drawn as it would be drawn without
speculation: by argmax, or with the uniforms of its (seed, choice, position). A draft is accepted exactly when it is
that token. See verify.py for why this is the rule of Leviathan et al. (2023), accept or resample.
"""
