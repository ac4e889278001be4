"""The answer store of a root: which stored file has the answer to a request, for jobs and for HTTP."""
