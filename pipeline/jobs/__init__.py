"""The life cycle of a job in the ledger: submit, plan, close, finish with a manifest, retry."""
