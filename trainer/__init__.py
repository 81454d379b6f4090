"""Train a vision-transformer teacher, distil it into a student, and prove what was done.

This package knows torch and timm; it knows nothing of kfp or kubernetes.
"""

__version__ = "0.1.0"
