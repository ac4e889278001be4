"""Tables in, tables out: a prompt template over the rows of a frame, and typed columns of answers."""
