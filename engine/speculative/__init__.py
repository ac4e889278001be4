"""Speculative decoding: cheap guesses at the next tokens, which one step of the model then checks all at once.

A draft changes when a token is known, never which one it is. Every position is drawn as it would be drawn without
speculation: by argmax, or with the uniforms that belong to its (seed, choice, position). A draft stays exactly when it
is that token. See verify.py for why this is the rule of Leviathan et al. (2023), accept or resample.
"""
