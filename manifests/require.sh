# Sourced by the scripts: versions, and what a missing tool is answered with.
# shellcheck shell=bash

MANIFESTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
set -o allexport
# shellcheck source=versions.env
source "$MANIFESTS/versions.env"
set +o allexport
export PATH="$PATH:$MANIFESTS/../.venv/bin" # make setup installs kubectl there

CLUSTER="${CLUSTER:-vit-distillation}" # kind's name of the cluster
export NAMESPACE=kubeflow              # KFP's manifests and ours state it

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# require TOOL WHAT_TO_DO
require() {
    command -v "$1" >/dev/null 2>&1 || fail "$1 is not installed; $2"
}

require_docker() {
    require docker "install Docker Engine (docs.docker.com/engine/install) and start it"
    docker info >/dev/null 2>&1 || fail "the Docker daemon does not answer; start it, or give this user the right to use it"
}

require_kind() {
    require kind "install kind $KIND_VERSION (kind.sigs.k8s.io)"
    kind version | grep -qF "kind $KIND_VERSION " ||
        fail "$(kind version | cut -d' ' -f1-2) is installed; the cluster is pinned to kind $KIND_VERSION (manifests/versions.env)"
}

require_kubectl() {
    require kubectl "run 'make setup', or install kubectl (kubernetes.io/docs/tasks/tools)"
}

cluster_exists() {
    kind get clusters 2>/dev/null | grep -qxF "$CLUSTER"
}

# wait_with IMAGE [kubectl's options]: the training operator's container before every worker, which waits for the master, has this image.
# A patch replaces the whole list of arguments, so others are read first and stay.
wait_with() {
    local flag=--pytorch-init-container-image operator=(kubectl "${@:2}" --namespace "$NAMESPACE") arguments
    arguments="$("${operator[@]}" get deployment training-operator \
        --output 'jsonpath={range .spec.template.spec.containers[?(@.name=="training-operator")].args[*]}{@}{"\n"}{end}')"
    arguments="$(sed -e "/^$flag=/d" -e '/^$/d' -e 's/["\\]/\\&/g' -e 's/.*/"&",/' <<<"$arguments" | tr -d '\n')"
    "${operator[@]}" patch deployment training-operator --patch \
        "{\"spec\":{\"template\":{\"spec\":{\"containers\":[{\"name\":\"training-operator\",\"args\":[$arguments\"$flag=$1\"]}]}}}}"
}
