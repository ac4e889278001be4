"""Control: ingest, planner, ledger, dispatcher, results, the ports of storage, queue and lane. Never imports torch."""
