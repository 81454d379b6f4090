"""What Inductor's scheduler makes of a function: its kernels and the bytes that they move, counted on this CPU for any device.

What is not fused is read and written once for each kernel. Attention and products count with their inputs and outputs.
"""

import functools

from functorch.compile import make_boxed_func
from torch._inductor import compile_fx
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V


class Counts:
    """A backend of torch.compile that runs graphs as they are, and adds up what Inductor would make of them."""

    def __init__(self):
        self.kernels, self.bytes = 0, 0
        self.backend = functools.partial(compile_fx.compile_fx, inner_compile=self._count)

    def _count(self, graph, inputs, **_):
        with V.set_fake_mode(compile_fx.fake_tensor_prop(graph, inputs)):
            compile_fx._recursive_post_grad_passes(graph, is_inference=False)
            output = next(node for node in graph.graph.nodes if node.op == "output")
            output.meta.setdefault("original_output_strides", [None] * len(output.args[0]))
            lowered = GraphLowering(graph, example_inputs=inputs)
            with V.set_graph_handler(lowered), V.set_debug_handler(DebugContext()):
                lowered.run(*inputs)
                lowered._update_scheduler()
                for kernel in lowered.scheduler.nodes:
                    moved = kernel.get_read_write_buffers_sizes()
                    self.kernels += moved > 0
                    self.bytes += moved
        return make_boxed_func(graph.forward)
