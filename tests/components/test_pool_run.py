"""`make run POOL=cpu`: what it refuses before anything starts; tests/local/test_cluster.py has whole runs."""

from __future__ import annotations

import os
import re

import pytest

from components import pool_run
from trainer.io.errors import EXIT_CODE
from trainer.runner import preflight

STORE = {
    "TRAINER_ARTIFACTS": "s3://bucket/x",
    "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
    "AWS_MAX_ATTEMPTS": "1",
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "key",
}


@pytest.mark.parametrize(
    ("arguments", "variables", "pattern"),
    [
        (["digts", "--pool", "cpu"], {}, r"unknown recipe 'digts'; did you mean digits\?.*"),
        (["digits", "--pool", "cpu", "--processes", "-1"], {}, r"processes_per_node must be >= 0 .*, got -1"),
        (["digits", "--pool", "cpu", "--nodes", "0"], {}, r"nodes must be >= 1, got 0"),
        (
            ["digits", "--pool", "", "--nodes", "2"],
            {},
            r"nodes = 2, but this machine is one; name a node pool with pool",
        ),
        (["digits", "--pool", ""], {}, r"--pool is empty; name a node pool .*"),
        (
            ["digits", "--pool", "cpu", "--set", "run.notify=https://host/x"],
            {},
            r"run.notify=https://host/x: every pod .* put them into the Secret vit-distillation-notify under TRAINER_NOTIFY, and leave .*",
        ),
        (["digits", "--pool", "gpu-a10"], {}, r".*gpu-a10.*did you mean gpu-a10g.*"),
        (
            ["digits", "--pool", "cpu"],
            {},
            r"TRAINER_ARTIFACTS='': a cluster's job cannot read what lies on this machine; .*",
        ),
        (
            ["digits", "--pool", "cpu"],
            STORE,
            r"s3://bucket/x: gave up after 1 attempts .* See to the store at http://127.0.0.1:9 .*",
        ),
    ],
)
def test_wrong_input_ends_in_one_message_before_anything_starts(
    tmp_path, monkeypatch, capsys, arguments, variables, pattern
):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "TRAINER_"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert pool_run.main(arguments) == EXIT_CODE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(rf"^error: {pattern}\n\Z", printed.err, flags=re.MULTILINE), printed.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("", "s3://bucket/x/checkpoints"),
        ("/runs/.checkpoints", "s3://bucket/x/checkpoints"),
        ("s3://other/checkpoints", "s3://other/checkpoints"),
    ],
)
def test_checkpoints_lie_where_pods_of_next_run_reach_them(tmp_path, monkeypatch, named, expected):
    seen = {}

    class CheckedError(Exception):
        pass

    def checked(_, **how):
        seen.update(how, checkpoints=os.environ["TRAINER_CHECKPOINTS"])
        raise CheckedError

    monkeypatch.setenv("TRAINER_ARTIFACTS", "s3://bucket/x")
    monkeypatch.setenv("TRAINER_CHECKPOINTS", named)
    monkeypatch.setattr(pool_run.storage, "children", lambda _: [])
    monkeypatch.setattr(preflight, "checked", checked)
    with pytest.raises(CheckedError):
        pool_run.main(["digits", "--pool", "cpu", "--nodes", "2", "--processes", "3"])
    assert seen == {"trains_here": False, "processes": 6, "device": "cpu", "checkpoints": expected}
