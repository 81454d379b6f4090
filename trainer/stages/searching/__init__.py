"""The parts of the stage search."""
