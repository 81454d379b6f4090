"""The pipeline's tasks: one thin KFP component a stage, and `configure` before them.

KFP ships the source of a component's function alone and evaluates its annotations there, so these modules do without
`from __future__ import annotations`, and what a body needs is imported inside it.
"""
