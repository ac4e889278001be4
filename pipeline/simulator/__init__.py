"""Days of an installation in minutes: a trace of jobs, the dispatcher's and the autoscaler's own decisions, and workers
that take the time that was measured."""
