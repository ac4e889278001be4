"""Doors: where jobs come in. Each ends in `Intake.accept`, and each may see the same thing twice."""
