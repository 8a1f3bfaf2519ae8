"""Plain PyTorch definitions of model families, traced by the front end."""
