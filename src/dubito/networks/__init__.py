"""The user's network: a rule per layer type, watching and swapping its modules, selections, networks by name."""
