"""A discrete-event simulation of interactive requests, step by step: prompts and answers on the same workers, or on
prefill and decode workers."""
