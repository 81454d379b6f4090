"""The launcher for clusters: runs a stage as a job on a node pool. The only package that knows Kubernetes."""
