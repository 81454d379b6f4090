"""The student as MLflow loads it, with its preprocessing; this folder travels with the registered model.

So it imports nothing else of this package, and itself by relative imports only. The rest of the package uses it for pixels too: `prepare`
makes its squares with `preprocessing`, and `models.Classifier` its inputs with `torch_network.Preprocessing`.
"""
