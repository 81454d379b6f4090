"""Runs stages on this machine, and the processes of a training."""
