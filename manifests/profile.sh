#!/usr/bin/env bash
# Sets up a profile of a shared Kubeflow for the pipeline: its key to Kubeflow's store, and overlays/profile. Can be repeated.
#   manifests/profile.sh NAMESPACE IMAGE        the image of the reaper; that of the tasks will do
# The training operator, MLflow and KFP are the cluster's (README.md).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/require.sh"
PROFILE="${1:-}" IMAGE="${2:-}"
[[ -n "$PROFILE" && -n "$IMAGE" ]] || fail "name the namespace of the profile, and the image of the reaper or of the tasks: profile.sh NAMESPACE IMAGE"
require_kubectl

profile() { kubectl --namespace "$PROFILE" "$@"; }
kubectl get namespace "$PROFILE" >/dev/null || fail "there is no namespace $PROFILE; make the profile in Kubeflow first"
grep -qx pytorchjobs.kubeflow.org <<<"$(kubectl api-resources --api-group=kubeflow.org --output name)" || fail "the cluster has no training operator; ask its administrators for it"
for kind in pytorchjobs.kubeflow.org trainjobs.trainer.kubeflow.org; do # Kubernetes lets nobody grant what they may not do themselves
    profile auth can-i create "$kind" >/dev/null 2>&1 ||
        fail "you may not create $kind in $PROFILE, and so not let the account do it; ask an administrator to run this"
done
profile get secret mlpipeline-minio-artifact >/dev/null ||
    fail "namespace $PROFILE has no Secret mlpipeline-minio-artifact, which KFP makes in a profile: is $PROFILE one?"

# The profile's key to Kubeflow's store, under the names that S3 clients read; replaced, since KFP may have made a new one.
key() { profile get secret mlpipeline-minio-artifact --output "jsonpath={.data.$1}" | base64 --decode; }
access="$(key accesskey)" # an error ends the script here, and not within <( )
secret="$(key secretkey)"
profile create secret generic vit-distillation-store --dry-run=client --output yaml --from-file=AWS_ACCESS_KEY_ID=<(printf %s "$access") \
    --from-file=AWS_SECRET_ACCESS_KEY=<(printf %s "$secret") | profile apply --filename -

kubectl kustomize "$MANIFESTS/overlays/profile" | sed -e "s/your-profile/$PROFILE/g" -e "s|image: vit-distillation:.*|image: $IMAGE|" | kubectl apply --filename -
printf "Set up. Deploy with NAMESPACE=%s and IMAGE; runs need the service account vit-distillation\n" "$PROFILE"
