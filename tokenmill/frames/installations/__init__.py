"""Tables that an installation answers: their requests are a job of its root, or a batch of its gateway."""
