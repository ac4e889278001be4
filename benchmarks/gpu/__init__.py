"""The engine on one GPU, measured in minutes on a bare machine: `python -m benchmarks.gpu --stage NAME`.

A GPU is often lent for half an hour, on a machine with torch, triton and transformers, no network, and nothing of ours
but these files. So nothing here, nor what it takes of `engine`, imports anything else (a test sees to that), each stage
is a process of its own with a limit of time, and what it has found is written after every part.
"""
