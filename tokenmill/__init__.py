"""The roof: the command line and the wiring of settings to parts. Nobody imports it."""
