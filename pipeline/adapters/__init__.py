"""Adapters of the ports to external systems: one file each, one folder for each technology."""
