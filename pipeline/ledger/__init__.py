"""The ledger: a job's objects in the store, and the indexes that find them without scanning history."""
