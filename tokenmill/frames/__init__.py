"""Tables in, tables out: texts rendered from the rows of a frame, and typed columns of answers."""
