"""Jobs behind the command line: in a folder, in a root, over HTTP."""
