"""Small manifests that the API server takes."""

import copy


def pod(name="one", code="print('hello')", **spec):
    container = {"name": "main", "image": "image:1", "command": ["python", "-c", code]}
    return {"metadata": {"name": name}, "spec": {"containers": [container], "restartPolicy": "Never"} | spec}


def pytorch_job(name="job", workers=1, restart_policy="Never", code="print('hello')", run_policy=None, **metadata):
    container = {"name": "pytorch", "image": "image:1", "command": ["python", "-c", code]}
    replica = {"replicas": 1, "restartPolicy": restart_policy, "template": {"spec": {"containers": [container]}}}
    replicas = {"Master": replica}
    if workers:
        replicas["Worker"] = {**copy.deepcopy(replica), "replicas": workers}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, **metadata},
        "spec": {"nprocPerNode": "2", "runPolicy": run_policy or {}, "pytorchReplicaSpecs": replicas},
    }


def train_job(name="job", nodes=2, code="print('hello')", **spec):
    trainer = {"image": "image:1", "command": ["python", "-c", code], "numNodes": nodes, "numProcPerNode": 1}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, **spec},
    }


def indexed_job(name="job", pods=2, code="print('hello')", **spec):
    container = {"name": "share", "image": "image:1", "command": ["python", "-c", code]}
    template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
    fixed = {"completionMode": "Indexed", "completions": pods, "parallelism": pods, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": fixed | spec}
