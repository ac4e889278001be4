"""From command line options and settings to the options of the parts below."""
