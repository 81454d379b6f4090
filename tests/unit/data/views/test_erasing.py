import torch

from trainer.data.views.erasing import erase, fill_together


def test_a_rectangle_is_filled_with_the_mean_and_the_rest_stays(images):
    views = images(3, 40, "noise")
    boxes = torch.tensor([[0.25, 0.5, 0.75, 0.75], [0, 0, 0, 0], [0.9, 0.1, 1.0, 1.0]])
    erased = erase(views.clone(), boxes)
    for row, (columns, rows) in {0: (slice(10, 30), slice(20, 30)), 2: (slice(36, 40), slice(4, 40))}.items():
        expected = views[row].clone()
        expected[:, rows, columns] = views[row].double().mean((1, 2)).round().byte().view(3, 1, 1)
        assert torch.equal(erased[row], expected)
    assert torch.equal(erased[1], views[1])


def test_nothing_is_erased_where_no_view_has_a_rectangle(images):
    views = images(3, 16)
    assert torch.equal(erase(views.clone(), torch.zeros(3, 4)), views)


def test_views_are_filled_one_by_one_or_together_to_the_same_bits(images):
    views = images(4, 40, "noise")
    boxes = torch.tensor([[0.26, 0.5, 0.74, 0.75], [0, 0, 1, 1], [0.9, 0.1, 0.99, 1.0], [0, 0, 0, 0]])
    together = views.clone()
    fill_together(together, torch.arange(3), (boxes[:3] * 40).round().long())
    assert torch.equal(together, erase(views.clone(), boxes))
