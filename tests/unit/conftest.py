import hashlib
import shutil

import pytest
import torch

from tests import shared_folders
from trainer.profiling.timeline import HostClock, Timeline, recording_to

torch.set_num_threads(1)  # other processes of the tests want a core too


@pytest.fixture
def timeline():
    """A timeline that is recording, also what `span` names."""
    timeline = Timeline(HostClock())
    timeline.start()
    with recording_to(timeline):
        yield timeline


@pytest.fixture(scope="session")
def trained_digits(tmp_path_factory):
    """A small real data set, and a teacher and a student that were trained on it (`TrainedDigits`)."""
    from tests.trained_digits import make_trained_digits  # here, because most tests need no data set

    directory = tmp_path_factory.mktemp("trained_digits")
    digits = make_trained_digits(directory)
    shared_folders.share(directory)
    return digits


@pytest.fixture(scope="session")
def tagged_dataset(trained_digits, tmp_path_factory):
    """The same data set with attributes and a hierarchy."""
    from tests.trained_digits import write_tagged_dataset

    path = tmp_path_factory.mktemp("tagged") / "dataset"
    write_tagged_dataset(trained_digits.dataset, path)
    return path


@pytest.fixture(scope="session")
def graphs_once(tmp_path_factory):
    """Write equal ONNX graphs once: each takes about a second, and most exports are of the same student."""
    from trainer.stages.onnx_export import int8, onnx_graph

    folder, write, quantize = tmp_path_factory.mktemp("graphs"), onnx_graph.write, int8.quantize

    def once(make, key, file):
        made = folder / f"{hashlib.sha256(key).hexdigest()}.onnx"
        if not made.exists():
            make(made)
        shutil.copyfile(made, file)

    def write_once(model, size, file):
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        once(lambda made: write(model, size, made), b"%d" % size + weights, file)

    def quantize_once(source, file, images, *, kept=frozenset()):
        key = source.read_bytes() + images.tobytes() + repr(sorted(kept)).encode()
        once(lambda made: quantize(source, made, images, kept=kept), key, file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx_graph, "write", write_once)
        patch.setattr(int8, "quantize", quantize_once)
        yield


@pytest.fixture(scope="session")
def finished(trained_digits, tagged_dataset, graphs_once, tmp_path_factory):
    """Makes the directory of a run whose student was judged by a gate; its classes have a hierarchy."""
    from trainer.config import EvaluateSettings, GateSettings
    from trainer.stages import evaluate

    def make(**gate):
        folder = tmp_path_factory.mktemp("finished")
        for name in ("teacher", "student"):
            (folder / name).symlink_to(getattr(trained_digits, name))
        (folder / "dataset").symlink_to(tagged_dataset)
        settings = EvaluateSettings(
            latency_runs=10, latency_batch_sizes=(1, 4), answer_risk=0.1, gate=GateSettings(**gate)
        )
        given = {name: folder / name for name in ("dataset", "teacher", "student", "evaluation")}
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("MLFLOW_TRACKING_URI", raising=False)
            evaluate.run(settings, **given)
        return folder

    return make


@pytest.fixture(scope="session")
def judged_run(finished):
    """The directory of a run whose student passed."""
    return finished(max_accuracy_drop=1)


@pytest.fixture(scope="session")
def exported(judged_run, tmp_path_factory):
    """That student as an ONNX file, in fp32."""
    pytest.importorskip("onnxruntime", reason="needs the extra `export`")
    from trainer.stages.onnx_export import exporting

    return exporting.export(str(judged_run), tmp_path_factory.mktemp("exported") / "served", quantized=False).directory


@pytest.fixture(params=["high", "medium", "allow_tf32", "matmul", "every"])
def short_products(request):
    """Flags with which torch computes float32 products in TF32 or bf16 where the device can, set in each way that there is; which one."""
    import torch

    backends, way = torch.backends, request.param
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv)
    before = [one.fp32_precision for one in places]
    if way in ("high", "medium"):
        torch.set_float32_matmul_precision(way)
    elif way == "allow_tf32":
        backends.cuda.matmul.allow_tf32 = True
    elif way == "matmul":
        backends.cuda.matmul.fp32_precision = "tf32"
    else:
        backends.fp32_precision = "tf32"
    yield way
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for one, precision in zip(places, before, strict=True):
        one.fp32_precision = precision
