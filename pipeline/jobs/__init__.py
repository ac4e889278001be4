"""A job's life in the ledger: submitted, closed, finished with a manifest, retried."""
