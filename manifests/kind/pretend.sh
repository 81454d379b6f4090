#!/usr/bin/env bash
# Lets two nodes of the kind cluster claim accelerators that they do not have, so that scheduling onto them can be tested. A pod that
# is scheduled there starts, and finds no device. Seen on Kubernetes 1.34.3 with two nodes that had no kubelet; not on kind yet.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../require.sh"
require_kubectl

# pretend NODE INSTANCE_TYPE TAINT RESOURCE=COUNT...
pretend() {
    local node instance="$2" taint="$3" patch=""
    node="$(kubectl get nodes --selector "vit-distillation/node=$1" --output 'jsonpath={.items[*].metadata.name}')"
    [[ -n "$node" ]] || fail "no node has the label vit-distillation/node=$1; is the current context the cluster of make kind-up?"
    shift 3
    for resource in "$@"; do # RFC 6901 writes the slash of a resource's name as ~1
        patch+="{\"op\":\"add\",\"path\":\"/status/capacity/${resource%%=*}\",\"value\":\"${resource##*=}\"},"
    done
    kubectl label node "$node" --overwrite "node.kubernetes.io/instance-type=$instance"
    kubectl taint node "$node" --overwrite "$taint=true:NoSchedule"
    kubectl patch node "$node" --subresource=status --type=json --patch "[${patch%,}]"
}

pretend gpu p4d.24xlarge nvidia.com/gpu nvidia.com~1gpu=8
pretend neuron trn1.32xlarge aws.amazon.com/neuron aws.amazon.com~1neuron=16 vpc.amazonaws.com~1efa=8
