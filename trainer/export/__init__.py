"""A student as an ONNX file that ONNX Runtime was seen to answer with: the graph, its int8 variants, and the choice between them.

Needs the extra `export`. `onnx` and `onnxruntime` are imported inside functions, since nothing else of the package needs them.
"""
