"""The object store on a local folder, and file locks."""
