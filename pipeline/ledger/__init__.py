"""The ledger: a job's objects in the store, and the indexes that find jobs without a scan of all history."""
