#!/usr/bin/env bash
# Builds an image and has it prove that it works: `make image [TARGET=cpu|gpu|neuron|serving|reaper] [IMAGE=name:tag]`. Not run yet.
#   manifests/images/build.sh TARGET IMAGE
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../require.sh"
TARGET="$1" IMAGE="$2"

case "$TARGET" in
cpu | gpu) dockerfile=Dockerfile ;; # one image: torch carries CUDA
neuron | serving | reaper) dockerfile="Dockerfile.$TARGET" ;;
*) fail "TARGET=$TARGET is not known; choose cpu, gpu, neuron, serving or reaper" ;;
esac
require_docker
DOCKER_BUILDKIT=1 docker build --file "$MANIFESTS/images/$dockerfile" --tag "$IMAGE" "$MANIFESTS/.."

# As a pod runs it: no right to write but to /tmp, no network, no root.
run() {
    docker run --rm --read-only --tmpfs /tmp --network none --cap-drop ALL --security-opt no-new-privileges --entrypoint "$1" "$IMAGE" "${@:2}"
}
run python -m trainer --version
if [[ "$TARGET" == reaper ]]; then
    run python -c 'import components.launch.finishing, components.launch.reaper, mlflow'
elif [[ "$TARGET" == serving ]]; then
    run python -c 'import mlflow, onnxruntime, openvino, s3fs, trainer.predict.photo_classifier, trainer.predict.serving.server'
else
    run python -m trainer config digits >/dev/null
    run python -c 'import torch, timm, mlflow, kfp, kubernetes, s3fs, components.launch'
fi
if [[ "$dockerfile" == Dockerfile ]]; then # what Triton does before its first kernel, which needs a GPU
    run python -c "$(<"$MANIFESTS/images/compile_driver.py")"
fi
run python -c 'import getpass; getpass.getuser()'
[[ "$(run id --user)" == 1000 ]] || fail "$IMAGE does not run as user 1000"
printf '%s works\n' "$IMAGE"
