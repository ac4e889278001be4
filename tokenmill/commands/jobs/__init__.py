"""`tokenmill jobs`: one file for each subcommand."""
