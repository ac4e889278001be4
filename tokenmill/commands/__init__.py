"""One file a command. Heavy parts (torch, pyarrow, pydantic) are imported inside the functions that need them, so that
`tokenmill --help` answers at once."""
