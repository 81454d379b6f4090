#!/usr/bin/env bash
# Makes a cluster on this machine with KFP, the training operator and MLflow: `make kind-up`. Can be repeated; what is there stays.
# Wants about 16 GB of memory and 60 GB of disk, by estimate. Not run yet: there was no Docker engine where this was written.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../require.sh"
require_docker
require_kind
require_kubectl

if cluster_exists; then
    echo "The cluster $CLUSTER is there already"
    kind export kubeconfig --name "$CLUSTER"
else
    kind create cluster --name "$CLUSTER" --image "$KIND_NODE_IMAGE" --config "$MANIFESTS/kind/cluster.yaml" --wait 5m
fi
"$MANIFESTS/kind/pretend.sh"
"$MANIFESTS/install.sh" kind
printf 'Ready. Next: make kind-load, then make test-kind or make deploy-pipeline RUN=1 POOL=cpu\n'
