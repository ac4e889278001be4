"""Ingest sources: where jobs come in. Each ends in `Intake.accept`, and each may see the same input twice."""
