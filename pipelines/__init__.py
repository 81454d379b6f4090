"""The pipeline: its definition, its compiled form, and its run on this machine."""
