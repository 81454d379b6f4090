#!/usr/bin/env bash
# Names what an EKS cluster and overlays/eks lack for install.sh, with the command for each, and changes nothing. install.sh eks begins with
# it. It cannot see the bucket, nor what an identity may do there. Written by the documentation of EKS's add-ons; not run on EKS.
#   manifests/check-eks.sh
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/require.sh"
require_kubectl

MISSING=""
lacks() { MISSING+="  - $1: $2"$'\n'; }
add_on="aws eks create-addon --cluster-name CLUSTER --addon-name"

labels="$(kubectl get nodes --output 'jsonpath={.items[*].metadata.labels}')"
classes="$(kubectl get storageclasses --output 'jsonpath={range .items[*]}{.metadata.annotations}{.provisioner}{"\n"}{end}')"
drivers="$(kubectl get csidrivers --output name)"
daemons="$(kubectl --namespace kube-system get daemonsets --output name)"
deployments="$(kubectl get deployments --all-namespaces --output name)"
kinds="$(kubectl get crds --output name)"
auto() { grep -q '/nodeclasses.eks.amazonaws.com$' <<<"$kinds"; } # EKS Auto Mode has agents and a Karpenter of its own, and no node at first

overlay="$MANIFESTS/overlays/eks"
# Roles by annotations of the service accounts, in the overlay, need no agent.
auto || grep -q 'eks-pod-identity-agent' <<<"$daemons" || grep -rq 'eks.amazonaws.com/role-arn' "$overlay" ||
    lacks "the agent of EKS Pod Identity" "$add_on eks-pod-identity-agent"
grep -q 'ebs.csi' <<<"$drivers" ||
    lacks "the EBS CSI driver, whose role R has the policy AmazonEBSCSIDriverPolicy" "$add_on aws-ebs-csi-driver \
      --pod-identity-associations serviceAccount=ebs-csi-controller-sa,roleArn=R --configuration-values '{\"defaultStorageClass\":{\"enabled\":true}}'"
default="$(grep '"storageclass.kubernetes.io/is-default-class":"true"' <<<"$classes" || true)"
if auto; then # it makes no class, and serves its own provisioner's alone
    grep -q 'ebs.csi.eks.amazonaws.com$' <<<"$default" ||
        lacks "a default StorageClass of Auto Mode" "kubectl create --filename - <<<'{\"apiVersion\":\"storage.k8s.io/v1\",\
      \"kind\":\"StorageClass\",\"metadata\":{\"name\":\"auto-ebs\",\"annotations\":{\"storageclass.kubernetes.io/is-default-class\":\"true\"}},\
      \"provisioner\":\"ebs.csi.eks.amazonaws.com\",\"volumeBindingMode\":\"WaitForFirstConsumer\",\"parameters\":{\"type\":\"gp3\"}}'"
elif [[ -z "$default" ]]; then
    lacks "a default StorageClass" "kubectl annotate storageclass NAME storageclass.kubernetes.io/is-default-class=true"
fi
if grep -q 'daemonset.apps/aws-node$' <<<"$daemons"; then # another network plugin is not judged
    arguments="$(kubectl --namespace kube-system get daemonset aws-node --output 'jsonpath={.spec.template.spec.containers[*].args}')"
    grep -q 'enable-network-policy=true' <<<"$arguments" || lacks "network policies, which the VPC CNI enforces only if told so" \
        "aws eks update-addon --cluster-name CLUSTER --addon-name vpc-cni --configuration-values '{\"enableNetworkPolicy\":\"true\"}'"
fi
if auto; then
    policies="$(kubectl --namespace kube-system get configmap amazon-vpc-cni --ignore-not-found --output 'jsonpath={.data.enable-network-policy-controller}')"
    [[ "$policies" == true ]] || lacks "network policies, which Auto Mode enforces only if told so" \
        "kubectl --namespace kube-system create configmap amazon-vpc-cni --from-literal=enable-network-policy-controller=true"
fi
family="$(kubectl --namespace default get service kubernetes --output 'jsonpath={.spec.ipFamilies[0]}')"
[[ "$family" != IPv6 ]] || lacks "IPv4 addresses, on which MLflow and a student's server listen" "a cluster made with ipFamily: IPv4"
auto || grep -qE 'cluster-autoscaler|karpenter' <<<"$deployments" ||
    lacks "the cluster autoscaler or Karpenter, without which node groups stay empty" "aws eks create-pod-identity-association \
      --cluster-name CLUSTER --namespace kube-system --service-account cluster-autoscaler --role-arn R && helm upgrade --install \
      cluster-autoscaler cluster-autoscaler --repo https://kubernetes.github.io/autoscaler --namespace kube-system --set \
      autoDiscovery.clusterName=CLUSTER,awsRegion=REGION,rbac.serviceAccount.name=cluster-autoscaler
      (karpenter.sh/docs has Karpenter's installation)"
# The smallest bundled pool, cpu, asks for two cores: an m5.large, eksctl's own choice, has 1.93 for pods. A NodePool of Karpenter without
# taints brings what is asked for; those of components/karpenter have taints.
general() {
    grep -q '/nodepools.karpenter.sh$' <<<"$kinds" &&
        kubectl get nodepools.karpenter.sh --output 'jsonpath={range .items[*]}[{.spec.template.spec.taints}]{"\n"}{end}' | grep -qxF '[]'
}
largest="$(kubectl get nodes --output 'jsonpath={range .items[*]}{.status.allocatable.cpu}{"\n"}{end}' |
    sed -e 's/^\([0-9]*\)$/\1000/' -e 's/m$//' | sort -n | tail -n 1)"
auto || general || [[ "${largest:-0}" -gt 2000 ]] ||
    printf 'warning: no node has more than two cores for pods (%sm), which the pool cpu asks for; unless a group grows: %s\n' "${largest:-0}" \
        "eksctl create nodegroup --cluster CLUSTER --name cpu --instance-types m7i.xlarge --nodes-min 1 --nodes-max 4" >&2
# A label that only GPU feature discovery sets; without it the driver is not judged here.
old="$(grep -oE '"nvidia.com/cuda.driver[a-z-]*.major":"[0-9]+"' <<<"$labels" | grep -oE '[0-9]+' | sort -n | head -n 1 || true)"
[[ -z "$old" || "$old" -ge 580 ]] ||
    lacks "NVIDIA's driver 580 or later on all GPU nodes, got $old" "a newer AMI: eksctl upgrade nodegroup --cluster CLUSTER --name NAME"
! grep -rq 's3://vit-distillation-artifacts/' "$overlay" || lacks "your bucket" "put it for vit-distillation-artifacts in $overlay"
! grep -q 'newName: registry/' "$overlay/kustomization.yaml" ||
    lacks "your image of the reaper, which waits in front of the workers of each job too" "make image TARGET=reaper IMAGE=NAME && docker push \
      NAME, and put NAME under images in $overlay/kustomization.yaml"

here="$(grep -oE '"topology.kubernetes.io/region":"[^"]*"' <<<"$labels" | head -n 1 | cut -d '"' -f 4 || true)"
region="$(sed -n 's/^AWS_DEFAULT_REGION=//p' "$overlay/environment.env")"
[[ -z "$here" || "$here" == "$region" ]] ||
    printf 'warning: the cluster is in %s, and %s names %s, which has to be the region of the bucket\n' "$here" "$overlay/environment.env" "$region" >&2

[[ -z "$MISSING" ]] || fail "this is missing for EKS, and nothing was applied:"$'\n'"${MISSING%$'\n'}"
