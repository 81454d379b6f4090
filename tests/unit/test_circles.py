"""Modules import each other in one direction only, also in functions and for types; import-linter sees circles of layers alone."""

from graphlib import TopologicalSorter

import grimp
import pytest


@pytest.mark.parametrize("package", ["trainer", "components", "pipelines"])
def test_no_modules_import_each_other_in_a_circle(package):
    graph = grimp.build_graph(package, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert any(imports.values())
    TopologicalSorter(imports).prepare()  # raises a CycleError with the modules
