#!/usr/bin/env bash
# Names everything that an EKS cluster and overlays/eks lack for install.sh, with the command for each, and changes nothing. install.sh eks
# begins with it. Written by the documentation of EKS's add-ons; not run on EKS.
#   manifests/check-eks.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/require.sh"
require_kubectl

MISSING=""
lacks() { MISSING+="  - $1: $2"$'\n'; }
add_on="aws eks create-addon --cluster-name CLUSTER --addon-name"

labels="$(kubectl get nodes --output 'jsonpath={.items[*].metadata.labels}')"
classes="$(kubectl get storageclasses --output 'jsonpath={.items[*].metadata.annotations}')"
drivers="$(kubectl get csidrivers --output name)"
daemons="$(kubectl --namespace kube-system get daemonsets --output name)"
deployments="$(kubectl get deployments --all-namespaces --output name)"
auto() { grep -q '"eks.amazonaws.com/compute-type":"auto"' <<<"$labels"; } # EKS Auto Mode has agents and a Karpenter of its own

grep -q 'ebs.csi' <<<"$drivers" ||
    lacks "the EBS CSI driver" "$add_on aws-ebs-csi-driver --configuration-values '{\"defaultStorageClass\":{\"enabled\":true}}'"
grep -q '"storageclass.kubernetes.io/is-default-class":"true"' <<<"$classes" ||
    lacks "a default StorageClass" "kubectl annotate storageclass NAME storageclass.kubernetes.io/is-default-class=true"
auto || grep -q 'eks-pod-identity-agent' <<<"$daemons" || lacks "the agent of EKS Pod Identity" "$add_on eks-pod-identity-agent"
if grep -q 'daemonset.apps/aws-node$' <<<"$daemons"; then # another network plugin is not judged
    arguments="$(kubectl --namespace kube-system get daemonset aws-node --output 'jsonpath={.spec.template.spec.containers[*].args}')"
    grep -q 'enable-network-policy=true' <<<"$arguments" || lacks "network policies, which the VPC CNI enforces only if told so" \
        "aws eks update-addon --cluster-name CLUSTER --addon-name vpc-cni --configuration-values '{\"enableNetworkPolicy\":\"true\"}'"
fi
auto || grep -qE 'cluster-autoscaler|karpenter' <<<"$deployments" ||
    lacks "the cluster autoscaler or Karpenter, without which node groups stay empty" "see manifests/README.md, Optional parts"
old="$(grep -oE '"nvidia.com/cuda.driver[a-z-]*.major":"[0-9]+"' <<<"$labels" | grep -oE '[0-9]+' | sort -n | head -n 1 || true)"
[[ -z "$old" || "$old" -ge 580 ]] ||
    lacks "NVIDIA's driver 580 or later on all GPU nodes, got $old" "a newer AMI: eksctl upgrade nodegroup --cluster CLUSTER --name NAME"
overlay="$MANIFESTS/overlays/eks"
! grep -rq 'vit-distillation-artifacts' "$overlay" || lacks "your bucket" "put it for vit-distillation-artifacts in $overlay"
! grep -q 'newName: registry/' "$overlay/kustomization.yaml" ||
    lacks "your image of the reaper" "put its name under images in $overlay/kustomization.yaml"

[[ -z "$MISSING" ]] || fail "this is missing for EKS, and nothing was applied:"$'\n'"${MISSING%$'\n'}"
