"""What a tenant may use: rates, running requests, uploads, stored bytes."""
