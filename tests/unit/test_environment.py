import os

import pytest

from trainer.environment import variables


def test_variables_are_put_back_whatever_ends_the_block(monkeypatch):
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("NEW", raising=False)

    def break_off():
        with variables({"KEPT": "inside", "NEW": "inside"}):
            assert (os.environ["KEPT"], os.environ["NEW"]) == ("inside", "inside")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_off()
    assert os.environ["KEPT"] == "before"
    assert "NEW" not in os.environ
