"""New versions of models: tried on copies of real work beside the version that is served, compared, and then promoted
or rolled back."""
