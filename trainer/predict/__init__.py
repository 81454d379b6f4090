"""Answers for photos: one, a folder, or a server."""
