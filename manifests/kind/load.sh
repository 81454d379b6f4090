#!/usr/bin/env bash
# Puts an image onto the node of the kind cluster that runs tasks and jobs: `make kind-load` (after `make image`). Not run yet.
# If it is one of tasks and jobs, the CronJob that deletes orphaned jobs and the container before every worker run on it from then on.
#   manifests/kind/load.sh IMAGE
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../require.sh"
IMAGE="${1:?name the image}"
require_docker
require_kind
require_kubectl

cluster_exists || fail "there is no kind cluster $CLUSTER; run 'make kind-up'"
docker image inspect "$IMAGE" >/dev/null 2>&1 || fail "the image $IMAGE is not on this machine; run 'make image'"
# Only there: it is several gigabytes, and the other nodes are tainted.
node="$(kubectl --context "kind-$CLUSTER" get nodes --selector vit-distillation/node=cpu --output 'jsonpath={.items[*].metadata.name}')"
kind load docker-image "$IMAGE" --name "$CLUSTER" --nodes "$node"
has_components='import sys; from importlib.util import find_spec; sys.exit(not find_spec("components"))'
if ! docker run --rm --entrypoint python "$IMAGE" -c "$has_components"; then # as the server's
    printf '%s has no code of tasks and jobs: the reaper and the training operator keep their image\n' "$IMAGE"
    exit
fi
kubectl --context "kind-$CLUSTER" --namespace "$NAMESPACE" set image cronjob/vit-distillation-reaper "reaper=$IMAGE"
wait_with "$IMAGE" --context "kind-$CLUSTER"
