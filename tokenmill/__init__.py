"""The command line, and the wiring of services by the settings. No other package imports it."""
