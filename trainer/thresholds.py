"""When each rule of `trainer.profiling.rules` fires: one group of thresholds per rule, by the rule's name.

Defaults that a managed profiling service had before are kept where they fit.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer.base_models import Fraction, NonNegative, NonNegativeFloat, Positive, Section

Percent = Annotated[float, Field(ge=0, le=100)]


class Thresholds(Section):
    """Settings of every rule."""

    enabled: bool = True
    """Whether the rule is judged."""


class BatchSize(Thresholds):
    """A batch that leaves the machine idle."""

    largest_percent: Percent = 70.0
    """95th percentile of CPU, GPU and GPU memory below which the machine is idle, in percent."""


class CpuBottleneck(Thresholds):
    """A device that waits while the processor is busy."""

    busy_percent: Percent = 90.0
    """Above this a core is busy, in percent."""
    gpu_percent: Percent = 10.0
    """Below this the GPU waits, in percent."""
    share: Fraction = 0.5
    """Share of the samples in which that must be so."""
    waiting_share: Fraction = 0.15
    """Share of the steps' time that waits for data which the processor makes."""
    own_share: Fraction = 0.65
    """The same where the processes that train on a CPU load for themselves: there loading is a part of the work."""


class IoBottleneck(Thresholds):
    """A training that waits for storage."""

    iowait_percent: Percent = 50.0
    """Above this the cores wait for storage, in percent of their time."""
    gpu_percent: Percent = 10.0
    """Below this the GPU waits, in percent."""
    share: Fraction = 0.5
    """Share of the samples in which that must be so."""
    waiting_share: Fraction = 0.15
    """Share of the steps' time that waits for data while the training and its loaders have nothing to do."""
    loader_percent: NonNegativeFloat = 30.0
    """Below this a loader process that is waited for waits itself, in percent of a core."""


class LoaderWorkers(Thresholds):
    """Too many or too few loader processes."""

    most_per_core: NonNegativeFloat = 2.0
    """More loader and training processes for each core than this are too many."""
    fewest_per_core: Fraction = 0.7
    """Fewer than this are too few where the training waits for data."""
    waiting_share: Fraction = 0.15
    """Share of the steps' time that waits for data."""
    own_share: Fraction = 0.65
    """The same where the processes that train on a CPU load for themselves."""


class GpuMemoryGrowth(Thresholds):
    """Memory that grows from step to step."""

    growth: Fraction = 0.05
    """Rise after the warm-up, as a share."""


class LoadBalance(Thresholds):
    """Processes with unequal work."""

    distance: Fraction = 0.5
    """Distance between the histograms of two GPUs' use (half the sum of absolute differences)."""
    waiting_share: Fraction = 0.2
    """Share of the steps' time that waits for the process with the most work."""


class GpuUtilization(Thresholds):
    """A GPU that is little used, or by fits and starts."""

    low_percent: Percent = 70.0
    """A 95th percentile below this is low, in percent."""
    idle_percent: Percent = 10.0
    """A 5th percentile below this, with a high 95th, is fluctuating, in percent."""


class StartUp(Thresholds):
    """A long time before the first step."""

    largest_minutes: NonNegativeFloat = 20.0
    """Minutes until the end of the first step, in a stage of any length."""
    share: Fraction = 0.25
    """Share of its stage's time above which a start-up is noted."""
    fewest_seconds: NonNegativeFloat = 30.0
    """A shorter start-up is never noted: every process has to load torch."""


class StepOutliers(Thresholds):
    """Single steps that take far longer than the others."""

    sigmas: NonNegativeFloat = 3.0
    """Standard deviations above the mean."""
    ignored: NonNegative = 10
    """First steps that are ignored."""
    share: Fraction = 0.03
    """Share of the steps' time that outliers must have cost."""


class HostToDevice(Thresholds):
    """A step that waits for copies to the device."""

    share: Fraction = 0.1
    """Share of the steps' time."""


class TeacherShare(Thresholds):
    """A teacher that takes much of each step, which recorded outputs would save."""

    share: Fraction = 0.25
    """Share of the steps' time."""
    views: Positive | None = None
    """Passes over the training images that a recording would take; as `reinforce.views` where not given."""


class Communication(Thresholds):
    """A step that waits for gradients of other processes."""

    share: Fraction = 0.2
    """Share of the steps' time that communication takes and that no computation hides."""


class HostSyncs(Thresholds):
    """Reading values back from the device in each step."""

    most_per_step: NonNegativeFloat = 1.0
    """Reads of a value (`.item()`, waiting for the device) in a step."""
    share_of_steps: Fraction = 0.1
    """On XLA, where each cuts the step's graph in two: share of the steps in which values come from the device."""


class Stragglers(Thresholds):
    """A process that is slower than the others, which wait for it."""

    slower: NonNegativeFloat = 0.2
    """How much longer its own work takes than the median process's, as a share of the step."""


class Recompilation(Thresholds):
    """Graphs that are compiled repeatedly."""

    after_steps: NonNegative = 10
    """Steps after which nothing should be compiled."""


class OwnOverhead(Thresholds):
    """What watching costs."""

    share: Fraction = 0.01
    """Share of the training's time."""
    fewest_seconds: NonNegativeFloat = 60.0
    """A shorter recording is not judged."""


class VanishingGradients(Thresholds):
    """Gradients too small to learn from."""

    mean_abs: NonNegativeFloat = 1e-7
    """Mean absolute gradient of a tensor."""
    share: Fraction = 0.5
    """Share of the measurements of tensors in which that must be so."""


class ExplodingGradients(Thresholds):
    """Gradients or weights that are not finite, or grow without bound."""

    growth: NonNegativeFloat = 100.0
    """Norm of the whole gradient against the larger of its first one and its median before, in two measurements in a row."""


class UpdateRatio(Thresholds):
    """Steps too large or too small for the weights."""

    largest: NonNegativeFloat = 1.0
    """Norm of the update against the norm of the weights, of the middle matrix."""
    smallest: NonNegativeFloat = 1e-7
    """The same below which steps make no difference: float32 rounds weights to 6e-8 of themselves."""


class LossNotFalling(Thresholds):
    """A loss that stays where it is."""

    fall: NonNegativeFloat = 0.03
    """Least fall from the first points of the loss to its window, as a share."""
    window: Fraction = 0.3
    """Share of the training, at its end, that is compared with its start."""


class Overfitting(Thresholds):
    """A validation loss that leaves the training loss behind."""

    ratio: NonNegativeFloat = 0.1
    """How far the validation loss is above its lowest, and above the training loss, as shares of these."""


class UnchangedWeights(Thresholds):
    """Weights that no step changes."""

    looks: Positive = 3
    """Looks in a row without a change."""


class PoorInitialisation(Thresholds):
    """Weights that start alike, or far from the usual scale."""

    largest_ratio: NonNegativeFloat = 20.0
    """Root mean square of a matrix's weights against that of the same matrix in another block."""
    largest_gain: NonNegativeFloat = 10.0
    """Root mean square of a matrix's weights times the fourth root of their number: how much about it stretches a signal."""


class ClassImbalance(Thresholds):
    """Classes of very different sizes."""

    ratio: NonNegativeFloat = 10.0
    """Images of the largest class against those of the smallest."""


class StalledTraining(Thresholds):
    """A training in which nothing happens."""

    seconds: NonNegativeFloat = 1800.0
    """Longest time without a step, validation and checkpoints taken off."""


class WeakTeacher(Thresholds):
    """A teacher that hardly knows more than chance, or no more than its student."""

    chance_times: NonNegativeFloat = 3.0
    """A teacher up to so many times the score of a guess by how frequent the classes are knows next to nothing ..."""
    headroom: Fraction = 0.25
    """... unless it has come this share of the way from there to perfection: where one class is frequent, few times are much."""
    margin: Fraction = 0.01
    """By how much, beside two standard errors, the student's validation score may be above its teacher's."""


class VanishingLossTerm(Thresholds):
    """A weighted loss term that makes no difference."""

    share: Fraction = 0.01
    """Share of the weighted loss that a term must have in some third of the training."""


class LowRecordedMass(Thresholds):
    """Recorded outputs that hold too little of the teacher's distribution."""

    mass: Fraction = 0.5
    """Least mean probability of the recorded classes, at the recorded temperature nearest to the loss's."""


class RuleSettings(Section):
    """When the rules fire; docs/rules.md describes them."""

    batch_size: BatchSize = BatchSize()
    cpu_bottleneck: CpuBottleneck = CpuBottleneck()
    io_bottleneck: IoBottleneck = IoBottleneck()
    loader_workers: LoaderWorkers = LoaderWorkers()
    gpu_memory_growth: GpuMemoryGrowth = GpuMemoryGrowth()
    load_balance: LoadBalance = LoadBalance()
    gpu_utilization: GpuUtilization = GpuUtilization()
    start_up: StartUp = StartUp()
    step_outliers: StepOutliers = StepOutliers()
    host_to_device: HostToDevice = HostToDevice()
    teacher_share: TeacherShare = TeacherShare()
    communication: Communication = Communication()
    host_syncs: HostSyncs = HostSyncs()
    stragglers: Stragglers = Stragglers()
    recompilation: Recompilation = Recompilation()
    own_overhead: OwnOverhead = OwnOverhead()
    vanishing_gradients: VanishingGradients = VanishingGradients()
    exploding_gradients: ExplodingGradients = ExplodingGradients()
    update_ratio: UpdateRatio = UpdateRatio()
    loss_not_falling: LossNotFalling = LossNotFalling()
    overfitting: Overfitting = Overfitting()
    unchanged_weights: UnchangedWeights = UnchangedWeights()
    poor_initialisation: PoorInitialisation = PoorInitialisation()
    class_imbalance: ClassImbalance = ClassImbalance()
    stalled_training: StalledTraining = StalledTraining()
    weak_teacher: WeakTeacher = WeakTeacher()
    vanishing_loss_term: VanishingLossTerm = VanishingLossTerm()
    low_recorded_mass: LowRecordedMass = LowRecordedMass()
