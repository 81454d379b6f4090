"""The launcher for clusters: a stage as a job on a node pool. The only place that imports `kubernetes`."""
