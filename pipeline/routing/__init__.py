"""The choice of the model that answers a request to a virtual model."""
