#!/usr/bin/env bash
# Installs KFP, the training operator and our own manifests into the cluster of the current context. Can be repeated.
#   manifests/install.sh OVERLAY        kind or eks; profile.sh sets up a profile of a Kubeflow that others run
# The order is that of KFP's own end-to-end tests.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/require.sh"

OVERLAY="${1:-}"
[[ "$OVERLAY" == kind || "$OVERLAY" == eks ]] || fail "overlay '$OVERLAY' is not known; name one: eks kind"
require_kubectl
require git "kubectl reads KFP's manifests with it"
kubectl version >/dev/null 2>&1 || fail "no cluster answers at context '$(kubectl config current-context 2>/dev/null || true)'; see kubectl config"
[[ "$OVERLAY" != eks ]] || "$MANIFESTS/check-eks.sh"
printf 'Installing into %s\n' "$(kubectl config current-context)"

KFP="github.com/kubeflow/pipelines/manifests/kustomize"
kubectl apply -k "$KFP/cluster-scoped-resources?ref=$KFP_VERSION"
kubectl wait crd/applications.app.k8s.io --for condition=established --timeout=60s
kubectl apply -k "$KFP/env/platform-agnostic?ref=$KFP_VERSION"
patch() { kubectl --namespace "$NAMESPACE" patch "$1" "$2" --patch-file "$MANIFESTS/$3"; }
patch configmap workflow-controller-configmap kfp/workflow-controller-configmap.yaml
patch deployment workflow-controller kfp/workflow-controller.yaml
patch deployment ml-pipeline kfp/api-server.yaml

# The CRD of PyTorchJob is too large for the annotation that a client-side apply writes.
kubectl apply --server-side --force-conflicts \
    -k "github.com/kubeflow/training-operator/manifests/overlays/standalone?ref=$TRAINING_OPERATOR_VERSION"
kubectl wait crd/pytorchjobs.kubeflow.org --for condition=established --timeout=60s
kubectl apply -k "$MANIFESTS/operator"
patch deployment training-operator operator/patch.yaml

# A warning for pods that violate it; nothing is enforced, since KFP's own would not pass.
kubectl label namespace "$NAMESPACE" --overwrite pod-security.kubernetes.io/warn=restricted

has_secret() { kubectl --namespace "$NAMESPACE" get secret "$1" >/dev/null 2>&1; }

if ! has_secret mlflow-database; then
    # A value of its own in each cluster, through standard input so that no process list shows it.
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n' |
        kubectl --namespace "$NAMESPACE" create secret generic mlflow-database --from-file=password=/dev/stdin
fi
if [[ "$OVERLAY" == kind ]] && ! has_secret vit-distillation-store; then
    # The key to KFP's own object store, under the names that S3 clients read.
    key() { kubectl --namespace "$NAMESPACE" get secret mlpipeline-minio-artifact --output "jsonpath={.data.$1}" | base64 --decode; }
    access="$(key accesskey)" # an error ends the script here, and not within <( )
    secret="$(key secretkey)"
    kubectl --namespace "$NAMESPACE" create secret generic vit-distillation-store \
        --from-file=AWS_ACCESS_KEY_ID=<(printf %s "$access") --from-file=AWS_SECRET_ACCESS_KEY=<(printf %s "$secret")
fi

kubectl apply -k "$MANIFESTS/overlays/$OVERLAY"
wait_with "$(kubectl --namespace "$NAMESPACE" get cronjob vit-distillation-reaper \
    --output 'jsonpath={.spec.jobTemplate.spec.template.spec.containers[0].image}')"

echo "Waiting for everything to be ready, 10 minutes at most"
{
    kubectl --namespace "$NAMESPACE" wait deployment --all --for=condition=Available --timeout=10m &&
        for database in $(kubectl --namespace "$NAMESPACE" get statefulset mlflow-database --ignore-not-found --output name); do
            kubectl --namespace "$NAMESPACE" rollout status "$database" --timeout=5m
        done
} || fail "not everything is ready in namespace $NAMESPACE; 'manifests/logs.sh FOLDER' collects why"
