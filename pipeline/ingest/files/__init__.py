"""Jobs from files that appear in a bucket or a folder."""
