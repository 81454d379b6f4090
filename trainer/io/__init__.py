"""Everything that the rest stands on: errors, limits on foreign input, files, stores, artifacts, and the host."""
