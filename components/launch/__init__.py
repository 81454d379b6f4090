"""The launcher for clusters: runs a stage as a job on a node pool. The only package that knows Kubernetes.

From the lowest layer to the highest:

    pools           node pools: where a job can run, what it gets there, what that costs
    job_manifest    what is sent: identity, pods, PyTorchJob and TrainJob; rendered by pure functions
    client          requests to the API server, what its errors mean, retries; the only module that imports `kubernetes`
    job_progress    what was observed of a job: messages, limits, outcome, cause; without clock and server
    readers         the threads that watch objects and read logs
    job             the job of a task, created once or adopted; the record that is kept of it
    launcher        submit, follow, explain, retry
    reaper          jobs that are no longer followed
"""
