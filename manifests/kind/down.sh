#!/usr/bin/env bash
# Removes the kind cluster with all that is in it: `make kind-down`. Not run yet.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../require.sh"
require_docker
require_kind

if cluster_exists; then
    kind delete cluster --name "$CLUSTER"
else
    echo "There is no kind cluster $CLUSTER"
fi
