import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from trainer import artifacts

NODES, PROCESSES_PER_NODE = 2, 2
SCRIPT = """
import sys
from trainer.errors import OutputError
from trainer.training.session import shared_artifact
from trainer.training.process_group import join_processes

with join_processes() as processes:
    with shared_artifact(processes, sys.argv[1], "evidence", settings={}, parents={}) as draft:
        (draft.path / f"rank{processes.rank}").write_text(str(processes.rank))
        if processes.is_first:
            draft.figures["rank"] = 0
    try:
        with shared_artifact(processes, "here", "model", settings={}, parents={}):
            pass
    except OutputError as error:
        print(error)
        processes.barrier()  # the others go on, for they see the output
        processes.gather({})
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return str(listener.getsockname()[1])


def run(uri, tmp_path):
    """What each process printed; every node has a cache and a current folder of its own."""
    root = str(Path(artifacts.__file__).parent.parent)
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    world = NODES * PROCESSES_PER_NODE
    with ExitStack() as stack:
        started = []
        for rank in range(world):
            node, local_rank = divmod(rank, PROCESSES_PER_NODE)
            folder = tmp_path / f"node{node}"
            folder.mkdir(exist_ok=True)
            place = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world, "TRAINER_CACHE": folder / "cache"}
            process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, uri],
                env=os.environ | common | {name: str(value) for name, value in place.items()},
                cwd=folder,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        printed = [process.communicate(timeout=300)[0] for process in started]
        assert [process.returncode for process in started] == [0] * world
        return printed


def test_every_node_adds_its_files_to_one_artifact(object_store, tmp_path):
    printed = run(object_store.uri("e"), tmp_path)
    artifact = artifacts.read(object_store.uri("e"), "evidence")
    assert {name: (artifact.path / name).read_text() for name in artifact.files} == {
        f"rank{r}": str(r) for r in range(4)
    }
    assert artifact.figures == {"rank": 0}
    assert 0 < artifact.startup_seconds < 60
    assert artifact.device == "cpu"
    writes = [one.path for one in object_store.requests if one.method == "PUT"]
    assert writes[-1] == "/artifacts/e/manifest.json"
    assert len(writes) == 5
    assert not list(tmp_path.glob("node*/cache/draft-*"))

    assert printed[:2] == ["", ""]
    for said in printed[2:]:
        assert said.startswith(
            "model here: lies on the disk of the first machine, which this one does not see; give an"
        )
