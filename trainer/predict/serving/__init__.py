"""An exported student behind HTTP: ONNX Runtime, micro-batches, limits, and a page.

Needs the extra `serve`, and neither torch nor timm. docs/design.md says why it is not KServe's SDK.
"""
