import os

import pytest

from trainer.environment import variables


def test_variables_are_put_back_whatever_ends_the_block(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)
    with pytest.raises(KeyError), variables({"KEPT": "inside", "NEW": "inside"}):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("inside", "inside")
        os.environ["NEVER SET"]
    assert os.environ["KEPT"] == "before"
    assert "NEW" not in os.environ
