"""The scripts say what is missing, and can be repeated.

Docker, kind and kubectl are played: each call is written down and answered as the test says. What the real ones would do is not
tested here, and was not tried.
"""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from components.launch import pools

MANIFESTS = Path(__file__).parents[2] / "manifests"
COREUTILS = (
    "bash",
    "base64",
    "cat",
    "cut",
    "dirname",
    "env",
    "grep",
    "head",
    "mkdir",
    "od",
    "rm",
    "sed",
    "sort",
    "tail",
    "tr",
    "sh",
)
EKS = {
    "get csidrivers": "csidriver.storage.k8s.io/ebs.csi.aws.com",
    "get storageclasses": '{"storageclass.kubernetes.io/is-default-class":"true"}ebs.csi.aws.com',
    "get daemonsets": "daemonset.apps/aws-node\ndaemonset.apps/eks-pod-identity-agent",
    "get daemonset aws-node": '["--enable-ipv6=false","--enable-network-policy=true"]',
    "get deployments": "deployment.apps/cluster-autoscaler",
    "get crds": "customresourcedefinition.apiextensions.k8s.io/pytorchjobs.kubeflow.org",
    "get nodes --output jsonpath={range": "1930m\n15890m\n4",
    "get nodes": '{"nvidia.com/cuda.driver-version.major":"580"}',
}
"""What a cluster answers that has all that check-eks.sh looks for."""
AUTO = {
    "get storageclasses": '{"storageclass.kubernetes.io/is-default-class":"true"}ebs.csi.eks.amazonaws.com',
    "get configmap amazon-vpc-cni": "true",
    "get nodes --output jsonpath={range": "",
    "get nodes": "",
    "get crds": "customresourcedefinition.apiextensions.k8s.io/nodeclasses.eks.amazonaws.com",
    "get daemonsets": "",
    "get deployments": "",
}
"""What one in Auto Mode answers differently, which has no nodes at first."""


class Machine:
    """A machine that has the tools of `PATH` below, and those that `play` adds."""

    def __init__(self, folder):
        self.tools, self.calls = folder / "bin", folder / "calls"
        self.tools.mkdir()
        self.calls.touch()
        for name in COREUTILS:
            (self.tools / name).symlink_to(shutil.which(name))

    def play(self, name, answers=""):
        """Add a tool. `answers` are the branches of a shell `case` over its arguments; else it succeeds without a word."""
        path = self.tools / name
        path.write_text(
            "#!/usr/bin/env bash\n"
            f'printf "%s\\n" "{name}${{*:+ }}$*" >>{shlex.quote(str(self.calls))}\n'
            f'case "$*" in */dev/stdin*) cat >{shlex.quote(str(self.tools.parent / "stdin"))};; *"--filename -") '
            f"cat >{shlex.quote(str(self.tools.parent / 'applied'))};; esac\n"
            f'case "$*" in\n{answers}\n*) ;;\nesac\n'
        )
        path.chmod(0o755)
        return self

    def play_eks(self, **answers):
        """Be an EKS cluster, with some answers changed, and an overlay that names somebody's bucket and image."""
        self.play("git")
        for path in (self.manifests() / "overlays" / "eks").iterdir():
            text = path.read_text().replace("s3://vit-distillation-artifacts/", "s3://acme-vit-distillation-artifacts/")
            path.write_text(text.replace("newName: registry/", "newName: my.registry/"))
        branches = [f'*"{question} "*) echo {shlex.quote(text)};;' for question, text in (EKS | answers).items()]
        cluster = '*"get cronjob"*) echo image:1;;\n*"get secret"*) exit 1;;\n*"get statefulset"*) echo statefulset/mlflow-database;;'
        return self.play("kubectl", "\n".join([*branches, cluster]))

    def manifests(self):
        copy = self.tools.parent / "manifests"
        if not copy.exists():
            shutil.copytree(MANIFESTS, copy)
        return copy

    def run(self, script, *arguments, **environment):
        # The environment's kubectl, which the scripts fall back on, must not be found either.
        environment |= {"PATH": str(self.tools), "HOME": str(self.tools.parent)}
        return subprocess.run(
            [self.manifests() / script, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def called(self, beginning=""):
        return [line for line in self.calls.read_text().splitlines() if line.startswith(beginning)]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def complete(machine, versions):
    """With everything, and an empty cluster that has just been made."""
    machine.play("docker").play("git")
    machine.play("kind", f'version) echo "kind {versions["KIND_VERSION"]} go1.24 linux/amd64";;')
    nodes = '"get nodes"*) echo played;;\n*"get cronjob"*) echo image:1;;'
    return machine.play(
        "kubectl", f'{nodes}\n*"get secret mlpipeline-minio-artifact"*) echo c2VjcmV0;;\n*"get secret"*) exit 1;;'
    )


def waiting_with(image):
    """The change of the operator's Deployment."""
    container = {"name": "training-operator", "args": [f"--pytorch-init-container-image={image}"]}
    return {"spec": {"template": {"spec": {"containers": [container]}}}}


SCRIPTS = {
    "kind/up.sh": [],
    "kind/load.sh": ["image:1"],
    "kind/down.sh": [],
    "kind/pretend.sh": [],
    "install.sh": ["kind"],
    "check-eks.sh": [],
    "profile.sh": ["team-a", "reaper:1"],
    "logs.sh": ["logs"],
    "images/build.sh": ["cpu", "image:1"],
}


def test_every_script_is_tested():
    found = {str(path.relative_to(MANIFESTS)) for path in MANIFESTS.rglob("*.sh")}
    assert found == {*SCRIPTS, "require.sh"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_missing_tool_is_named_with_what_to_do(machine, script):
    result = machine.run(script, *SCRIPTS[script])
    assert result.returncode == 2
    assert re.fullmatch(r"error: (docker|kubectl) is not installed; \S.+\n", result.stderr)


def test_a_daemon_that_does_not_answer(machine):
    machine.play("docker", "info) exit 1;;")
    assert "error: the Docker daemon does not answer; start it" in machine.run("kind/up.sh").stderr


def test_another_version_of_kind_is_refused(machine, versions):
    machine.play("docker").play("kind", 'version) echo "kind v0.20.0 go1.20 linux/amd64";;')
    result = machine.run("kind/up.sh")
    assert result.returncode == 2
    assert (
        f"error: kind v0.20.0 is installed; the cluster is pinned to kind {versions['KIND_VERSION']}" in result.stderr
    )
    assert machine.called("kind create") == []


def test_installing_stops(machine):
    machine.play("git").play("kubectl", 'version) exit 1;;\n"config current-context") echo nowhere;;')
    result = machine.run("install.sh", "kind")
    assert (result.returncode, machine.called("kubectl apply")) == (2, [])
    assert "error: no cluster answers at context 'nowhere'" in result.stderr
    # An unknown overlay.
    assert machine.run("install.sh", "gke").stderr == "error: overlay 'gke' is not known; name one: eks kind\n"
    assert machine.run("install.sh").returncode == 2


def test_up_makes_a_cluster_and_installs_in_order(complete, versions):
    result = complete.run("kind/up.sh")
    assert result.returncode == 0, result.stderr
    (created,) = complete.called("kind create cluster")
    assert f"--image {versions['KIND_NODE_IMAGE']}" in created
    applied = [re.sub(r" /\S*/manifests/", " ", call) for call in complete.called("kubectl apply")]
    kfp = "github.com/kubeflow/pipelines/manifests/kustomize"
    operator = "github.com/kubeflow/training-operator/manifests/overlays/standalone"
    assert applied == [
        f"kubectl apply -k {kfp}/cluster-scoped-resources?ref={versions['KFP_VERSION']}",
        f"kubectl apply -k {kfp}/env/platform-agnostic?ref={versions['KFP_VERSION']}",
        f"kubectl apply --server-side --force-conflicts -k {operator}?ref={versions['TRAINING_OPERATOR_VERSION']}",
        "kubectl apply -k operator",
        "kubectl apply -k overlays/kind",
    ]
    patched = [re.sub(r" /\S*/manifests/", " ", call) for call in complete.called("kubectl --namespace kubeflow patch")]
    assert [call.removeprefix("kubectl --namespace kubeflow patch ") for call in patched] == [
        "configmap workflow-controller-configmap --patch-file kfp/workflow-controller-configmap.yaml",
        "deployment workflow-controller --patch-file kfp/workflow-controller.yaml",
        "deployment ml-pipeline --patch-file kfp/api-server.yaml",
        "deployment training-operator --patch-file operator/patch.yaml",
        "deployment training-operator --patch " + json.dumps(waiting_with("image:1"), separators=(",", ":")),
    ]
    calls = complete.called("kubectl")
    first_wait = next(index for index, call in enumerate(calls) if "wait crd/applications" in call)
    assert (
        calls.index(complete.called("kubectl apply")[0]) < first_wait < calls.index(complete.called("kubectl apply")[1])
    )
    made = [call for call in calls if "create secret" in call]
    assert [call.split()[6] for call in made] == ["mlflow-database", "vit-distillation-store"]
    password = (complete.tools.parent / "stdin").read_text()
    assert re.fullmatch("[0-9a-f]{48}", password), "it becomes part of a URL"
    assert not any(password in call or "c2VjcmV0" in call or "=secret" in call for call in calls), (
        "no value stands in a command"
    )


def test_other_arguments_of_the_training_operator_stay(complete):
    there = ["--gang-scheduler-name=volcano", "--pytorch-init-container-image=old:1"]
    complete.play(
        "kubectl",
        f'*"get deployment training-operator"*) printf "%s\\n" {" ".join(there)};;\n'
        '*"get cronjob"*) echo image:1;;\n*"get secret"*) echo c2VjcmV0;;',
    )
    assert complete.run("install.sh", "kind").returncode == 0
    (patched,) = (call for call in complete.called() if "training-operator --patch " in call)
    (container,) = json.loads(patched.partition("--patch ")[2])["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--gang-scheduler-name=volcano", "--pytorch-init-container-image=image:1"]


def test_up_leaves_what_is_there(complete, versions):
    version = f'version) echo "kind {versions["KIND_VERSION"]} go1.24 linux/amd64";;'
    complete.play("kind", f'{version}\n"get clusters") echo vit-distillation;;')
    complete.play("kubectl", '"get nodes"*) echo node/played;;')  # every Secret is there, too
    result = complete.run("kind/up.sh")
    assert result.returncode == 0, result.stderr
    assert complete.called("kind create") == []
    assert complete.called("kind export kubeconfig --name vit-distillation")
    assert not any("create secret" in call for call in complete.called())


def test_on_eks_no_key_is_made(machine):
    """Pods have an identity there."""
    result = machine.play_eks().run("install.sh", "eks")
    assert result.returncode == 0, result.stderr
    assert [call.split()[6] for call in machine.called() if "create secret" in call] == ["mlflow-database"]


@pytest.mark.parametrize(
    ("answers", "missing"),
    [
        (
            {"get csidrivers": "csidriver.storage.k8s.io/efs.csi.aws.com"},
            ["the EBS CSI driver, whose role R .*: aws eks create-addon"],
        ),
        ({"get storageclasses": "{} {}"}, ["a default StorageClass: kubectl annotate storageclass"]),
        ({"get daemonsets": "daemonset.apps/aws-node"}, ["the agent of EKS Pod Identity: aws eks create-addon"]),
        (
            {"get daemonset aws-node": '["--enable-network-policy=false"]'},
            ["network policies, .*: aws eks update-addon"],
        ),
        ({"get daemonsets": "daemonset.apps/cilium\ndaemonset.apps/eks-pod-identity-agent"}, []),
        ({"get deployments": "deployment.apps/coredns"}, ["the cluster autoscaler or Karpenter, .*"]),
        ({"get deployments": "deployment.apps/karpenter"}, []),
        ({"get nodes --output jsonpath={range": "1930m\n1930m"}, []),
        ({"get nodes --output jsonpath={range": "940m\n4"}, []),
        (
            {"get nodes": '{"nvidia.com/cuda.driver.major":"570"} {"nvidia.com/cuda.driver.major":"580"}'},
            [".* got 570: .*"],
        ),
        ({"get nodes": "{}"}, []),
        (AUTO, []),
        (
            AUTO | {"get storageclasses": EKS["get storageclasses"], "get configmap amazon-vpc-cni": ""},
            ["a default StorageClass of Auto Mode: kubectl create", "network policies, which Auto Mode .*: kubectl"],
        ),
        ({"get service kubernetes": "IPv6"}, ["IPv4 addresses, .*"]),
        (
            {"get csidrivers": "", "get storageclasses": "", "get daemonsets": "", "get deployments": ""},
            ["the agent.*", "the EBS.*", "a default.*", "the cluster autoscaler.*"],
        ),
    ],
)
def test_what_eks_lacks_is_named_before_anything_is_applied(machine, answers, missing):
    machine.play_eks(**answers)
    result = machine.run("install.sh", "eks")
    assert result.returncode == (2 if missing else 0), result.stderr
    lines = re.findall(r"^  - (.*)$", result.stderr, re.MULTILINE)
    assert len(lines) == len(missing)
    assert all(re.match(pattern, line) for pattern, line in zip(missing, lines, strict=True))
    assert bool(missing) == (machine.called("kubectl apply") == [])
    small = "1930m\n1930m" in answers.values()
    assert ("warning: no node has more than two cores for pods (1930m)" in result.stderr) == small


def test_roles_by_annotations_need_no_agent(machine):
    """IRSA, which names the role in the overlay."""
    machine.play_eks(**{"get daemonsets": "daemonset.apps/aws-node"})
    assert machine.run("check-eks.sh").returncode == 2
    with (machine.manifests() / "overlays" / "eks" / "kustomization.yaml").open("a") as overlay:
        overlay.write("# patches: eks.amazonaws.com/role-arn: arn:aws:iam::1:role/vit-distillation\n")
    assert machine.run("check-eks.sh").returncode == 0


@pytest.mark.parametrize(("taints", "warned"), [('[[{"key":"nvidia.com/gpu"}]]\n[]', False), ('[[{"key":"a"}]]', True)])
def test_pools_of_karpenter_with_taints_bring_no_node_for_tasks(machine, taints, warned):
    machine.play_eks(
        **{
            "get deployments": "deployment.apps/karpenter",
            "get crds": "customresourcedefinition.apiextensions.k8s.io/nodepools.karpenter.sh",
            "get nodepools.karpenter.sh": taints,
            "get nodes --output jsonpath={range": "1930m",
        }
    )
    result = machine.run("check-eks.sh")
    assert (result.returncode, "no node has more than two cores" in result.stderr) == (0, warned)


@pytest.mark.parametrize(("region", "warned"), [("us-east-1", False), ("eu-west-1", True)])
def test_another_region_than_the_cluster_has_is_said(machine, region, warned):
    machine.play_eks(**{"get nodes": f'{{"topology.kubernetes.io/region":"{region}"}}'})
    result = machine.run("check-eks.sh")
    said = f"warning: the cluster is in {region}, and " in result.stderr and "names us-east-1" in result.stderr
    assert (result.returncode, said) == (0, warned)


def test_an_overlay_as_it_comes_is_not_installed_on_eks(machine):
    machine.play_eks()
    shutil.copytree(MANIFESTS / "overlays", machine.manifests() / "overlays", dirs_exist_ok=True)
    result = machine.run("install.sh", "eks")
    assert (result.returncode, machine.called("kubectl apply")) == (2, [])
    assert re.findall(r"^  - (your \w+)", result.stderr, re.MULTILINE) == ["your bucket", "your image"]


def test_a_profile_gets_its_key_and_the_overlay(machine):
    rendered = "namespace: your-profile\nimage: vit-distillation:0.2.0"
    answers = f'*"get secret"*jsonpath*) echo c2VjcmV0;;\n*kustomize*) echo {shlex.quote(rendered)};;'
    operator = '*"api-resources"*) echo pytorchjobs.kubeflow.org;;'
    machine.play("kubectl", f"{answers}\n{operator}")
    result = machine.run("profile.sh", "team-a", "registry/reaper:1")
    assert result.returncode == 0, result.stderr
    (created,) = machine.called("kubectl --namespace team-a create secret generic vit-distillation-store")
    assert "secret=" not in created
    assert machine.called("kubectl --namespace team-a apply --filename -")
    assert machine.called("kubectl apply --filename -")
    assert (machine.tools.parent / "applied").read_text() == "namespace: team-a\nimage: registry/reaper:1\n"
    # What is missing is named, and nothing applied.
    for question, message in {
        "get namespace": "there is no namespace team-a",
        "api-resources": "the cluster has no training operator",
        "auth can-i create trainjobs.trainer.kubeflow.org": "you may not create trainjobs.trainer.kubeflow.org in team-a",
        "get secret": "namespace team-a has no Secret mlpipeline-minio-artifact",
    }.items():
        machine.calls.write_text("")
        machine.play("kubectl", f'*"{question}"*) exit 1;;\n{operator}')
        result = machine.run("profile.sh", "team-a", "registry/reaper:1")
        assert (result.returncode, message in result.stderr) == (2, True)
        assert not any("apply" in call for call in machine.called())
    for arguments in ([], ["team-a"]):
        assert "error: name the namespace of the profile, and the image" in machine.run("profile.sh", *arguments).stderr


@pytest.mark.parametrize(("script", "arguments"), [("install.sh", ["kind"]), ("profile.sh", ["team-a", "reaper:1"])])
def test_a_key_that_cannot_be_read_makes_no_secret(complete, script, arguments):
    """An error within <( ) would end nothing, and an empty key stay."""
    operator = '*"api-resources"*) echo pytorchjobs.kubeflow.org;;'
    complete.play(
        "kubectl", f'{operator}\n*"get secret"*jsonpath*) exit 1;;\n*"get secret vit-distillation-store"*) exit 1;;'
    )
    assert complete.run(script, *arguments).returncode != 0
    assert not [call for call in complete.called() if "create secret generic vit-distillation-store" in call]


def test_up_stops(complete):
    complete.play("kubectl", '"get nodes"*) echo node/played;;\n"apply -k"*) echo "no such host" >&2; exit 1;;')
    result = complete.run("kind/up.sh")
    assert result.returncode != 0
    assert "no such host" in result.stderr
    assert len(complete.called("kubectl apply")) == 1
    # What does not get ready is said.
    complete.play("kubectl", '*"wait deployment"*) echo "timed out: deployments/ml-pipeline" >&2; exit 1;;')
    result = complete.run("install.sh", "kind")
    assert result.returncode == 2
    assert "deployments/ml-pipeline" in result.stderr
    assert "'manifests/logs.sh FOLDER' collects why" in result.stderr


def test_pretended_nodes_suit_their_pools(complete):
    assert complete.run("kind/pretend.sh").returncode == 0
    taints = [call.removeprefix("kubectl taint node played --overwrite ") for call in complete.called("kubectl taint")]
    machines = [call.split("instance-type=")[1] for call in complete.called("kubectl label")]
    patches = [json.loads(call.split("--patch ")[1]) for call in complete.called("kubectl patch")]
    assert all("--subresource=status --type=json" in call for call in complete.called("kubectl patch"))
    assert taints == ["nvidia.com/gpu=true:NoSchedule", "aws.amazon.com/neuron=true:NoSchedule"]
    for name, machine, patch in zip(("gpu-a100", "neuron-trn1-16"), machines, patches, strict=True):
        pool = pools.get(name)
        assert pool.pod["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": machine}
        capacity = {one["path"].removeprefix("/status/capacity/").replace("~1", "/"): one["value"] for one in patch}
        assert capacity == {name: count for name, count in pool.resources.items() if "/" in name}


def test_pretending_in_another_cluster_stops(machine):
    machine.play("kubectl")
    result = machine.run("kind/pretend.sh")
    assert result.returncode == 2
    assert "error: no node has the label vit-distillation/node=gpu" in result.stderr
    assert machine.called("kubectl patch") == []


def test_load_wants_cluster_and_image(complete, versions):
    assert (
        "error: there is no kind cluster vit-distillation; run 'make kind-up'"
        in complete.run("kind/load.sh", "image:1").stderr
    )
    version = f'version) echo "kind {versions["KIND_VERSION"]} go1.24 linux/amd64";;'
    complete.play("kind", f'{version}\n"get clusters") echo vit-distillation;;')
    complete.play("kubectl", '*"get nodes"*) echo played-worker;;')
    assert complete.run("kind/load.sh", "image:1").returncode == 0
    assert complete.called("kind load") == [
        "kind load docker-image image:1 --name vit-distillation --nodes played-worker"
    ]
    *_, reaper, _, operator = complete.called()  # the last two: the operator's arguments, read and written
    assert reaper.endswith("--namespace kubeflow set image cronjob/vit-distillation-reaper reaper=image:1")
    start = "kubectl --context kind-vit-distillation --namespace kubeflow patch deployment training-operator --patch "
    assert json.loads(operator.removeprefix(start)) == waiting_with("image:1")
    complete.play("docker", "run*components*) exit 1;;")
    before = len(complete.called("kubectl"))
    result = complete.run("kind/load.sh", "server:1")
    assert (result.returncode, "no code of tasks and jobs" in result.stdout) == (0, True)
    assert complete.called("kind load")[-1].startswith("kind load docker-image server:1 ")
    assert all("get nodes" in call for call in complete.called("kubectl")[before:]), "the server's image cannot do that"
    complete.play("docker", '"image inspect"*) exit 1;;')
    assert (
        "error: the image image:1 is not on this machine; run 'make image'"
        in complete.run("kind/load.sh", "image:1").stderr
    )


def test_down_can_be_repeated(complete, versions):
    assert complete.run("kind/down.sh").stdout == "There is no kind cluster vit-distillation\n"
    version = f'version) echo "kind {versions["KIND_VERSION"]} go1.24 linux/amd64";;'
    complete.play("kind", f'{version}\n"get clusters") echo vit-distillation;;')
    assert complete.run("kind/down.sh").returncode == 0
    assert complete.called("kind delete") == ["kind delete cluster --name vit-distillation"]


def test_an_image_is_built_and_has_to_work(machine):
    machine.play("docker", '*"image:1 --user") echo 1000;;')
    dockerfiles = {
        "cpu": "Dockerfile",
        "gpu": "Dockerfile",
        "neuron": "Dockerfile.neuron",
        "serving": "Dockerfile.serving",
        "reaper": "Dockerfile.reaper",
    }
    for target, dockerfile in dockerfiles.items():
        result = machine.run("images/build.sh", target, "image:1")
        assert (result.returncode, result.stdout) == (0, "image:1 works\n")
        assert f"/images/{dockerfile} --tag image:1" in machine.called("docker build")[-1]
    assert "image:1 works" not in machine.run("images/build.sh", "tpu", "image:1").stdout


@pytest.mark.parametrize("answers", ['*"trainer --version") exit 1;;', '*"image:1 --user") echo 0;;'])
def test_an_image_that_does_not_work_is_none(machine, answers):
    machine.play("docker", answers)
    result = machine.run("images/build.sh", "cpu", "image:1")
    assert result.returncode != 0
    assert "works" not in result.stdout


def test_logs_are_collected_as_far_as_they_can_be_had(machine, tmp_path):
    machine.play(
        "kubectl",
        '*"get pods --output name") echo pod/one; echo pod/two;;\n*"get workflows"*) echo "no such kind" >&2; exit 1;;\n'
        '*"logs pod/one"*--previous) exit 1;;\n*"logs"*) echo "a line";;',
    )
    folder = tmp_path / "logs"
    assert machine.run("logs.sh", str(folder)).returncode == 0
    assert {path.name for path in (folder / "pods").iterdir()} == {
        "one.log", "one.describe.txt", "two.log", "two.previous.log", "two.describe.txt",
    }  # fmt: skip
    assert (folder / "pods" / "two.log").read_text() == "a line\n"
    assert "no such kind" in (folder / "workflows.yaml").read_text()
    assert all("--namespace kubeflow " in call for call in machine.called())
    machine.calls.write_text("")
    assert machine.run("logs.sh", str(folder), NAMESPACE="team-a").returncode == 0
    assert all("--namespace team-a " in call for call in machine.called())
    assert not any("secret" in call for call in machine.called())
