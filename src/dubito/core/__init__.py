"""Tools that do not depend on networks: errors, settings, parameters by name, randomness, processes, files, batches."""
