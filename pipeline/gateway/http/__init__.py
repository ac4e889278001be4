"""HTTP itself: server, connections, authentication, bodies, errors, pagination."""
