"""Tables that lie on a cluster: each of its processes computes blocks of them with a model of its own."""
