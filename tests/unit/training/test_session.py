from tests.forks import Program, free_port
from trainer.io import artifacts

NODES, PROCESSES_PER_NODE = 2, 2
SCRIPT = """
import sys
from trainer.io.errors import OutputError
from trainer.training.session import shared_artifact
from trainer.devices.process_group import join_processes

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


def run(uri, tmp_path):
    """What each process printed; every node has a cache and a current folder of its own."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": free_port(), "WORLD_SIZE": str(NODES * PROCESSES_PER_NODE)}
    programs = []
    for rank in range(NODES * PROCESSES_PER_NODE):
        node, local_rank = divmod(rank, PROCESSES_PER_NODE)
        folder = tmp_path / f"node{node}"
        folder.mkdir(exist_ok=True)
        place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "TRAINER_CACHE": str(folder / "cache")}
        programs.append(Program(SCRIPT, uri, folder=folder, **common, **place))
    return [program.end()[0] for program in programs]


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
