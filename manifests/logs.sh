#!/usr/bin/env bash
# Collects what tells why something failed: objects, events, and the logs of every container, the one before a restart as well.
#   [CONTEXT=kubeconfig's] [NAMESPACE=kubeflow] manifests/logs.sh FOLDER
# Goes on where one of them cannot be had: a part is better than nothing. Secrets are not read.
set -uo pipefail
wanted="${NAMESPACE:-}"
source "$(dirname "${BASH_SOURCE[0]}")/require.sh"
NAMESPACE="${wanted:-$NAMESPACE}"
FOLDER="${1:?name a folder}"
require_kubectl
mkdir -p "$FOLDER/pods" || fail "$FOLDER cannot be made"

get() { kubectl ${CONTEXT:+--context="$CONTEXT"} --namespace "$NAMESPACE" --request-timeout=30s "$@"; }

get describe nodes >"$FOLDER/nodes.txt" 2>&1
get get events --sort-by=.lastTimestamp >"$FOLDER/events.txt" 2>&1
for kind in pods deployments statefulsets services configmaps persistentvolumeclaims pytorchjobs workflows; do
    get get "$kind" --output yaml >"$FOLDER/$kind.yaml" 2>&1
done
for pod in $(get get pods --output name); do
    name="${pod#pod/}"
    get describe "$pod" >"$FOLDER/pods/$name.describe.txt" 2>&1
    get logs "$pod" --all-containers --prefix --timestamps --tail=20000 >"$FOLDER/pods/$name.log" 2>&1
    get logs "$pod" --all-containers --prefix --timestamps --previous >"$FOLDER/pods/$name.previous.log" 2>/dev/null ||
        rm -f "$FOLDER/pods/$name.previous.log"
done
printf 'Logs of the namespace %s: %s\n' "$NAMESPACE" "$FOLDER"
