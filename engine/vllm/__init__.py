"""vLLM as an engine behind `engine.step_engine.StepEngine`: any model that it computes, with our tokenizer and ledger.

It is an optional package, whose pins differ from those of tokenmill's other packages (docs/vllm.md). Versions tried:
0.32.0, the CPU build. Only these modules import it, and none of them at import.
"""
