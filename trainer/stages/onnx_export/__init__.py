"""A student as an ONNX file that ONNX Runtime was seen to answer with: the graph, its int8 variants, and the choice between them.

Needs the extra `export`. `onnx` and `onnxruntime` are imported inside functions, since nothing else of the package needs them.
"""

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("onnx", "onnxruntime", "onnxscript")


def missing_package(*further: str) -> str:
    """Return the first package of the extra, or of further ones, that is not installed; empty where all are. Imports none of them."""
    for name in (*PACKAGES, *further):
        try:
            version(name)  # by its distribution, whose version the registered model names
        except PackageNotFoundError:
            return name
    return ""
