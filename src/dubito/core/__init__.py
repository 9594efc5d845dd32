"""Tools that know nothing of networks: errors, settings, parameters by name, randomness, processes, files, batches."""
