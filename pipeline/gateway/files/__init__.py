"""OpenAI files: multipart uploads, downloads by range."""
