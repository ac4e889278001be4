"""A discrete-event simulation of an installation: days in minutes, from a trace of jobs, with the dispatcher's and the
autoscaler's production code, and workers with measured throughput."""
