"""The launcher for clusters: runs a stage as a job on a node pool. The only package that knows Kubernetes.

From the lowest layer to the highest:

    pools           node pools: where a job can run, what it gets there, what that costs
    identity        name, labels and owner of a job, and the hash of its specification
    pod_template    the pods of a job, with their environment
    api_errors      requests to the API server, the errors that its answers mean, retries
    backends        PyTorchJob and TrainJob: rendered by pure functions, and read
    client          the Kubernetes client, the only module that imports `kubernetes`
    job_progress    what was observed of a job: messages, limits, outcome, cause; without clock and server
    readers         the threads that watch objects and read logs
    job             the job of a task, created once or adopted; the record that is kept of it
    launcher        submit, follow, explain, retry
    reaper          jobs that are no longer followed
"""
