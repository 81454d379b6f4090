import pytest

from trainer.html import table


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.54219, "0.5422"),
        (3260.21, "3,260"),
        (29190.4, "29,190"),
        (1234567.0, "1,234,567"),
        (float("inf"), "inf"),
        (7, "7"),
    ],
)
def test_numbers_are_shown_as_people_write_them(value, shown):
    assert f'<td class="number">{shown}</td>' in table(["images a second"], [[value]])
