"""Commands as a user gives them: each in a process of its own, in a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

from trainer.graph import STAGES

ROOT = Path(__file__).parent.parent.parent
SMALL = (
    "pretrain.mae.epochs=1 pretrain.finetune.epochs=1 distill.epochs=1 evaluate.latency_runs=10 export.finetune_steps=0"
)


def environment(**variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "TRAINER_"))}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"} | variables


def run(words, folder, **variables):
    """Give a command there and wait for its end."""
    return subprocess.run(
        words,
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        start_new_session=True,
    )


SERVER = """
import importlib, json, os, runpy, socket, sys
folder, *modules = sys.argv[1:]
for name in modules:
    importlib.import_module(name)
sys.executable = folder + "/python3"
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(folder + "/socket")
    listener.listen()
    print("ready", flush=True)
    while True:
        client, _ = listener.accept()
        _, files, _, _ = socket.recv_fds(client, 1, 3)
        words, cwd, variables = json.loads(client.makefile("rb").readline())
        if not os.fork():
            if program := os.fork():
                client.sendall(b"%d" % os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]))
                os._exit(0)
            break
        client.close()
        [os.close(file) for file in files]
client.close()
for number, file in enumerate(files):
    os.dup2(file, number)
    os.close(file)
sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))
os.chdir(cwd)
os.environ.clear()
os.environ.update(variables)
option, sys.argv = words[0], words[1:]
assert option == "-m", words
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect("{folder}/socket")
    socket.send_fds(server, [b"."], [0, 1, 2])
    server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    sys.exit(int(server.recv(9)))
"""


@contextmanager
def forking_python():
    """Make an interpreter whose `-m MODULE` forks from a process that has imported kfp and the stages, which takes seconds."""
    modules = ["trainer.__main__", "mlflow.tracking", "kfp.dsl.executor", "components.task"]
    modules += [f"trainer.stages.{name}" for name in STAGES]
    variables = environment(_KFP_RUNTIME="true", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    with tempfile.TemporaryDirectory() as folder:
        client = Path(folder, "python3")
        client.write_text(CLIENT.format(python=sys.executable, folder=folder), encoding="utf-8")
        client.chmod(0o755)
        command = [sys.executable, "-c", SERVER, folder, *modules]
        with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE) as server:
            try:
                assert server.stdout.readline() == b"ready\n"
                yield str(client)
            finally:
                server.kill()
