"""An MLflow store without runs; MLflow takes seconds to make one, and a copy of it takes a moment."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path


def make(file: Path) -> Path:
    """Let MLflow make its tables in a new SQLite file."""
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):  # each table has its line
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The ``noload`` loader strategy is deprecated")  # MLflow on SQLAlchemy 2.1
        MlflowClient(f"sqlite:///{file}").search_experiments()
    return file
