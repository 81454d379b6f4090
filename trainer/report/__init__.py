"""What people read of a run: charts, pages, the summary, the bill, and MLflow."""
