"""Evidence as a large training on GPUs leaves it, made up, and answers of rules about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from trainer.io.costs import Machines, Price
from trainer.profiling.evidence import (
    TENSOR_COLUMNS,
    AttemptRecord,
    CommunicationRecord,
    CompilationRecord,
    ContextRecord,
    Curve,
    Operator,
    OperatorTable,
    RankEvidence,
    RankRecord,
    TensorSamples,
    TrainingEvidence,
)
from trainer.profiling.findings import Answer
from trainer.profiling.rules.outcomes import Finding, Healthy, NotJudged, Saving
from trainer.profiling.series import Series

RANKS, CORES, STEPS, SAMPLES, BLOCKS, LOOKS = 64, 192, 16384, 8192, 24, 200
PLACE = Machines(
    pool="gpu-a100",
    instance="p4d.24xlarge",
    nodes=8,
    processes_per_node=8,
    price=Price(dollars_an_hour=21.96, date="2026-11", region="us-east-1", source="the provider's list"),
)


def made_up_answers() -> list[Answer]:
    """Findings of every severity, rules that found nothing, and rules that could not judge."""

    def answer(rule: str, outcome: Finding | Healthy | NotJudged, dollars: float | None = None) -> Answer:
        title = rule.replace("_", " ").capitalize()
        return Answer(rule=rule, title=title, kind="system", training="distill", outcome=outcome, dollars=dollars)

    workers = Finding(
        severity="warning",
        confidence=0.9,
        text="Steps wait for data for 31 % of their time, while 60 of 192 cores have nothing to do.",
        advice="Set distill.workers=12 (now 4), so that loading keeps up with the steps.",
        saving=Saving(seconds=4000.0, reason="the time that steps wait beyond the fastest tenth of them"),
        numbers={"waiting_share": 0.31, "idle_cores": 60.0, "queued_batches": 0.2},
    )
    outliers = replace(
        workers,
        severity="note",
        confidence=0.6,
        text="32 steps took more than 3 standard deviations longer than the mean.",
        advice="Look at what else ran on the machine then.",
        saving=Saving(seconds=12.0, reason="their time beyond the median"),
        numbers={"outliers": 32.0, "longest_ms": 9000.0},
        steps=(40, 4000),
    )
    gradients = replace(
        workers,
        severity="severe",
        confidence=1.0,
        text="Gradients of blocks.7 are not finite from step 9,000 on.",
        advice="Lower distill.base_learning_rate to 2.5e-4.",
        saving=None,
        numbers={"growth": float("inf")},
        window_s=(6000.0, 7500.0),
    )
    return [
        answer("step_outliers", outliers, 0.59),
        answer("loader_workers", workers, 195.2),
        answer("exploding_gradients", gradients),
        answer("start_up", Healthy(text="The first step ended after 40 s.")),
        answer("host_syncs", NotJudged(reason="the window of torch.profiler was turned off")),
    ]


def enlarged(training: TrainingEvidence) -> TrainingEvidence:
    """A distillation over 64 GPUs, with full tables, 300 tensors and 24 blocks of attention."""
    random = np.random.default_rng(0)
    first = training.ranks[0]
    seconds = 0.5 + 0.05 * random.standard_normal(STEPS) ** 2
    seconds[40:4000:124] *= 6
    ended = float(seconds.sum()) + 60
    steps = _steps(first, seconds, random)
    system = _system(first, ended, random)
    tensors = _tensors(ended, random)
    ranks = [
        replace(first, record=_record(first, rank, ended), steps=steps, system=system, tensors=tensors)
        for rank in range(RANKS)
    ]
    points = np.arange(LOOKS, dtype=float)
    metrics = {
        f"attention_entropy/network.blocks.{block}": _curve(points * 80, ended, random) for block in range(BLOCKS)
    }
    metrics |= {name: _curve(np.arange(4096.0) * 4, ended, random) for name in ("loss", "val_top1", "agreement")}
    return replace(training, ranks=ranks, metrics=metrics)


def _steps(first: RankEvidence, seconds: Series, random: np.random.Generator) -> Mapping[str, Series]:
    split = random.dirichlet(np.ones(len(first.ranges)), STEPS) * seconds[:, None]
    columns = {name: np.zeros(STEPS) for name in first.steps}
    return columns | {
        "step": np.arange(STEPS, dtype=float),
        "start_s": np.cumsum(seconds) - seconds + 30,
        "seconds": seconds,
        "images": np.full(STEPS, 1024.0),
        "host_seconds": seconds,
        "host_delayed_seconds": seconds / 2,
        "queued": random.integers(0, 3, STEPS).astype(float),
        **{name: split[:, index] for index, name in enumerate(first.ranges)},
    }


def _system(first: RankEvidence, ended: float, random: np.random.Generator) -> Mapping[str, Series]:
    signals = [name for name in first.system if name != "end_s" and not name.startswith("cpu")]
    gpu = ("gpu_memory_used_bytes", "gpu_memory_allocated_bytes")
    total = {"gpu_memory_total_bytes": np.full(SAMPLES, 40e9)}
    return {
        "end_s": np.linspace(ended / SAMPLES, ended, SAMPLES),
        **{f"cpu{core}_percent": 100 * random.random(SAMPLES) for core in range(CORES)},
        **{
            name: 10 * random.random(SAMPLES) if name.endswith("percent") else 1e9 * random.random(SAMPLES)
            for name in signals
        },
        "gpu_percent": 100 * random.random(SAMPLES),
        **total,
        **{name: 30e9 + 1e9 * random.random(SAMPLES) for name in gpu},
    }


def _tensors(ended: float, random: np.random.Generator) -> TensorSamples:
    kinds = ("attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias", "norm1.weight", "norm1.bias")
    kinds += ("mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias", "norm2.weight", "norm2.bias")
    names = ["cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"]
    names += [f"blocks.{block}.{kind}" for block in range(BLOCKS) for kind in kinds]
    names += ["norm.weight", "norm.bias", "head.weight", "head.bias"]
    shape = (LOOKS, len(names))
    values = {name: np.exp(random.standard_normal(shape)) for name in TENSOR_COLUMNS}
    broken = np.zeros(shape)
    broken[150:, names.index("blocks.7.mlp.fc1.weight")] = 0.25
    values |= {"weight_nonfinite": np.zeros(shape), "gradient_nonfinite": broken}
    return TensorSamples(
        tensors=names, steps=np.arange(LOOKS) * 80.0, seconds=np.linspace(0, ended, LOOKS), values=values
    )


def _record(first: RankEvidence, rank: int, ended: float) -> RankRecord:
    names = [f"aten::operator_{index}_{'x' * 150}" for index in range(300)]
    operators = [
        Operator(name=name, kind=kind, category="other", calls=9, self_cpu_ms=1.0, self_device_ms=300.0 - index)
        for kind in ("operator", "kernel")
        for index, name in enumerate(names)
    ]
    norm = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float)"
    operators.insert(
        0, Operator(name=norm, kind="kernel", category="normalization", calls=9, self_cpu_ms=0.0, self_device_ms=301.0)
    )
    began = first.record.began_unix
    changes = {
        "rank": rank,
        "world_size": RANKS,
        "ended_s": ended,
        "host": f"node-{rank // 8}.cluster.example",
        "device": f"cuda:{rank % 8} (NVIDIA A100-SXM4-40GB)",
        "cores": CORES,
        "place": PLACE,
        "workers": 4,
        "context": ContextRecord(settings={"batch_size": 1024, "workers": 4}, parameters=86_000_000, total_steps=STEPS),
        "startup": {
            "fetch": 12.0,
            "imports": 9.0,
            "join": 4.0,
            "preparation": 20.0,
            "compile": 55.0,
            "first_step": 8.0,
        },
        "compilations": (CompilationRecord(step=0, graphs=13, seconds=55.0),),
        "communication": CommunicationRecord(steps=10, backward_s=0.2, exchange_s=0.12, hidden_s=0.1),
        "overhead": {"marks": 12.0, "tensors": 20.0, "monitor": 30.0, "operators": 4.0, "rules": 2.0},
        "attempts": (
            AttemptRecord(began_unix=began - 900, seen_unix=began - 100, first_step=0, steps_seen=1500),
            AttemptRecord(began_unix=began, seen_unix=began + ended, first_step=1000, steps_seen=STEPS - 1000),
        ),
        "operators": OperatorTable(steps=3, operators=tuple(operators)),
        "steps": first.record.steps.model_copy(update={"count": STEPS}),
        "outside": {},
    }
    return first.record.model_copy(update=changes)


def _curve(steps: Series, ended: float, random: np.random.Generator) -> Curve:
    values = 0.6 + 0.3 * np.exp(-np.linspace(0, 3, len(steps))) + 0.02 * random.random(len(steps))
    return Curve(steps=steps, seconds=steps / steps[-1] * ended, values=values)
