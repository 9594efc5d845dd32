"""The user's network: one rule per layer type, selections of its weights, and networks by name."""
