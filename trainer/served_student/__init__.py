"""The student as MLflow loads it, with its preprocessing; this folder travels with the registered model.

So it imports nothing else of this package, and refers to itself by relative imports only. What it does to pixels is done here alone:
`prepare` makes its squares with `preprocessing`, and `models.Classifier` its inputs with `network_input`.
"""
