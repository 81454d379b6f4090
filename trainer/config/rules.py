"""The thresholds of the rules of `trainer.profiling.rules`, which judge trainings: settings, so that reading a recipe imports no rule."""

from __future__ import annotations

from trainer.config.former_names import accepting_former_names
from trainer.io.base_models import Fraction, NonNegative, NonNegativeFloat, Percent, Positive, Section

RULES_GROUP = "vit_distillation.rules"
"""Group of the entry points by which installed packages add rules."""
FEW_LABELS = 50
"""Labels a class up to which a linear probe of public weights makes the better teacher; measured with 10."""


class Thresholds(Section):
    """What every rule has."""

    enabled: bool = True
    """Whether the rule is judged."""


class IoBottleneckThresholds(Thresholds):
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


class LoaderWorkersThresholds(Thresholds):
    most_per_core: NonNegativeFloat = 2.0
    """More loader and training processes for each core than this are too many."""
    fewest_per_core: Fraction = 0.7
    """Fewer than this are too few where the training waits for data."""
    waiting_share: Fraction = 0.15
    """Share of the steps' time that waits for data."""
    own_share: Fraction = 0.65
    """The same where the processes that train on a CPU load for themselves."""


class CpuBottleneckThresholds(Thresholds):
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


class CoresOversubscribedThresholds(Thresholds):
    share: Fraction = 0.15
    """Share of the steps' time in which the training had no core."""
    own_share: Fraction = 0.4
    """The same where a CPU trains."""
    busy_percent: Percent = 90.0
    """Above this a core is busy, in percent."""


class HostToDeviceThresholds(Thresholds):
    share: Fraction = 0.1
    """Share of the steps' time."""


class HostSyncsThresholds(Thresholds):
    most_per_step: NonNegativeFloat = 1.0
    """Reads of a value (`.item()`, waiting for the device) in a step."""
    share_of_steps: Fraction = 0.1
    """On XLA, where each cuts the step's graph in two: share of the steps in which values come from the device."""


class CommunicationThresholds(Thresholds):
    share: Fraction = 0.2
    """Share of the steps' time that communication takes and that no computation hides."""


class StragglersThresholds(Thresholds):
    slower: NonNegativeFloat = 0.2
    """How much longer its own work takes than the median process's, as a share of the step."""


class LoadBalanceThresholds(Thresholds):
    distance: Fraction = 0.5
    """Distance between the histograms of two GPUs' use (half the sum of absolute differences)."""
    waiting_share: Fraction = 0.2
    """Share of the steps' time that waits for the process with the most work."""


class BatchSizeThresholds(Thresholds):
    largest_percent: Percent = 70.0
    """95th percentile of CPU, GPU and GPU memory below which the machine is idle, in percent."""


class GpuUtilizationThresholds(Thresholds):
    low_percent: Percent = 70.0
    """A 95th percentile below this is low, in percent."""
    idle_percent: Percent = 10.0
    """A 5th percentile below this, with a high 95th, is fluctuating, in percent."""


class TeacherShareThresholds(Thresholds):
    share: Fraction = 0.25
    """Share of the steps' time."""
    views: Positive | None = None
    """Passes over the training images that a recording would take; as `reinforce.views` where not given."""


class GpuMemoryGrowthThresholds(Thresholds):
    growth: Fraction = 0.05
    """Rise after the warm-up, as a share."""


class StartUpThresholds(Thresholds):
    largest_minutes: NonNegativeFloat = 20.0
    """Minutes until the end of the first step, in a stage of any length."""
    share: Fraction = 0.25
    """Share of its stage's time above which a start-up is noted."""
    fewest_seconds: NonNegativeFloat = 30.0
    """A shorter start-up is never noted: every process has to load torch."""


class RecompilationThresholds(Thresholds):
    after_steps: NonNegative = 10
    """Steps after which nothing should be compiled."""


class UnevenStepsThresholds(Thresholds):
    spread: NonNegativeFloat = 0.5
    """Median change from a step to the next, as a share of the median step."""
    share: Fraction = 0.1
    """Share of the steps' time above that of the fastest quarter."""
    busy_percent: Percent = 90.0
    """Above this mean use all cores are taken, in percent."""


class StepOutliersThresholds(Thresholds):
    sigmas: NonNegativeFloat = 3.0
    """Standard deviations above the mean."""
    ignored: NonNegative = 10
    """First steps that are ignored."""
    share: Fraction = 0.03
    """Share of the steps' time that outliers must have cost."""
    alone_seconds: NonNegativeFloat = 60.0
    """A single outlier that cost less is an accident: nobody can tell what it came from, or whether it comes back."""


class OwnOverheadThresholds(Thresholds):
    share: Fraction = 0.01
    """Share of the training's time."""
    fewest_seconds: NonNegativeFloat = 60.0
    """A shorter recording is not judged."""


class CheckInputImagesThresholds(Thresholds):
    largest_mean: NonNegativeFloat = 3.0
    """A channel's mean further from 0 than this is of pixels that were not normalized, or wrongly."""
    smallest_std: NonNegativeFloat = 0.05
    """A channel that varies less than this was scaled down twice."""
    largest_std: NonNegativeFloat = 4.0
    """A channel that varies more than this was not scaled, or normalized twice."""
    blank: Fraction = 0.25
    """Share of images without any difference between their pixels."""


class PoorInitializationThresholds(Thresholds):
    largest_ratio: NonNegativeFloat = 20.0
    """Root mean square of a matrix's weights against that of the same matrix in another block."""
    largest_gain: NonNegativeFloat = 10.0
    """Root mean square of a matrix's weights times the fourth root of their number: how much about it stretches a signal."""


class ExplodingGradientsThresholds(Thresholds):
    growth: NonNegativeFloat = 100.0
    """Norm of the whole gradient against the larger of its first one and its median before, in two measurements in a row."""


class LossNotFiniteThresholds(Thresholds):
    lasting: Positive = 3
    """Points at the end that are not finite: a training does not recover from weights that are no numbers."""
    share: Fraction = 0.05
    """Share of the points up to which those that are not finite are a note."""


class DeadReluThresholds(Thresholds):
    share: Fraction = 0.5
    """Share of a layer's units that are 0 for every image."""


class SaturatedActivationThresholds(Thresholds):
    share: Fraction = 0.5
    """Share of a layer's units that are at an end of their range for every image."""


class TensorVarianceThresholds(Thresholds):
    smallest: NonNegativeFloat = 1e-5
    """Standard deviation of what a layer gives."""
    largest: NonNegativeFloat = 1e4
    """The same; half precision ends at 65,504."""


class VanishingGradientsThresholds(Thresholds):
    mean_abs: NonNegativeFloat = 1e-7
    """Mean absolute gradient of a tensor."""
    share: Fraction = 0.5
    """Share of the measurements of tensors in which that must be so."""


class UpdateRatioThresholds(Thresholds):
    largest: NonNegativeFloat = 1.0
    """Norm of the update against the norm of the weights, of the middle matrix."""
    smallest: NonNegativeFloat = 1e-7
    """The same below which steps make no difference: float32 rounds weights to 6e-8 of themselves."""


class UnchangedWeightsThresholds(Thresholds):
    looks: Positive = 3
    """Looks in a row without a change."""


class AllZeroThresholds(Thresholds):
    looks: Positive = 3
    """Looks in a row at nothing but zeros."""


class LossNotFallingThresholds(Thresholds):
    fall: NonNegativeFloat = 0.03
    """Least fall from the first points of the loss to its window, as a share."""
    window: Fraction = 0.3
    """Share of the training, at its end, that is compared with its start."""


class OverfittingThresholds(Thresholds):
    ratio: NonNegativeFloat = 0.1
    """How far the validation loss is above its lowest, and above the training loss, as shares of these."""


class OvertrainingThresholds(Thresholds):
    share: Fraction = 0.5
    """Share of the training, at its end, without progress on the validation split."""
    delta: NonNegativeFloat = 0.01
    """Least fall of the validation loss below its best that is progress, as a share."""
    measurements: Positive = 5
    """Measurements on the validation split without progress."""


class ConfusedClassesThresholds(Thresholds):
    share: Fraction = 0.5
    """Share of a class's validation images that get the same wrong answer."""
    fewest: Positive = 10
    """Images of the class in the validation split."""
    score: Fraction = 0.5
    """Top-1 accuracy below which a model confuses classes in general."""


class StalledTrainingThresholds(Thresholds):
    seconds: NonNegativeFloat = 1800.0
    """Longest time without a step, validation and checkpoints taken off."""


class ClassImbalanceThresholds(Thresholds):
    ratio: NonNegativeFloat = 10.0
    """Images of the largest class against those of the smallest."""


class WeakTeacherThresholds(Thresholds):
    chance_times: NonNegativeFloat = 3.0
    """A teacher up to so many times the score of a guess by how frequent the classes are knows next to nothing ..."""
    headroom: Fraction = 0.25
    """... unless it has come this share of the way from there to perfection: where one class is frequent, few times are much."""
    margin: Fraction = 0.01
    """By how much, beside two standard errors, the student's validation score may be above its teacher's."""


class VanishingLossTermThresholds(Thresholds):
    share: Fraction = 0.01
    """Share of the weighted loss that a term must have in some third of the training."""


class LowRecordedMassThresholds(Thresholds):
    mass: Fraction = 0.5
    """Least mean probability of the recorded classes, at the recorded temperature nearest to the loss's."""


class RuleSettings(Section):
    """Every rule, with its thresholds; docs/rules.md describes them."""

    _renamed = accepting_former_names("rules")

    io_bottleneck: IoBottleneckThresholds = IoBottleneckThresholds()
    loader_workers: LoaderWorkersThresholds = LoaderWorkersThresholds()
    cpu_bottleneck: CpuBottleneckThresholds = CpuBottleneckThresholds()
    cores_oversubscribed: CoresOversubscribedThresholds = CoresOversubscribedThresholds()
    host_to_device: HostToDeviceThresholds = HostToDeviceThresholds()
    host_syncs: HostSyncsThresholds = HostSyncsThresholds()
    communication: CommunicationThresholds = CommunicationThresholds()
    stragglers: StragglersThresholds = StragglersThresholds()
    load_balance: LoadBalanceThresholds = LoadBalanceThresholds()
    batch_size: BatchSizeThresholds = BatchSizeThresholds()
    gpu_utilization: GpuUtilizationThresholds = GpuUtilizationThresholds()
    teacher_share: TeacherShareThresholds = TeacherShareThresholds()
    gpu_memory_growth: GpuMemoryGrowthThresholds = GpuMemoryGrowthThresholds()
    start_up: StartUpThresholds = StartUpThresholds()
    recompilation: RecompilationThresholds = RecompilationThresholds()
    uneven_steps: UnevenStepsThresholds = UnevenStepsThresholds()
    step_outliers: StepOutliersThresholds = StepOutliersThresholds()
    own_overhead: OwnOverheadThresholds = OwnOverheadThresholds()
    check_input_images: CheckInputImagesThresholds = CheckInputImagesThresholds()
    poor_initialization: PoorInitializationThresholds = PoorInitializationThresholds()
    exploding_gradients: ExplodingGradientsThresholds = ExplodingGradientsThresholds()
    loss_not_finite: LossNotFiniteThresholds = LossNotFiniteThresholds()
    dead_relu: DeadReluThresholds = DeadReluThresholds()
    saturated_activation: SaturatedActivationThresholds = SaturatedActivationThresholds()
    tensor_variance: TensorVarianceThresholds = TensorVarianceThresholds()
    vanishing_gradients: VanishingGradientsThresholds = VanishingGradientsThresholds()
    update_ratio: UpdateRatioThresholds = UpdateRatioThresholds()
    all_zero: AllZeroThresholds = AllZeroThresholds()
    unchanged_weights: UnchangedWeightsThresholds = UnchangedWeightsThresholds()
    loss_not_falling: LossNotFallingThresholds = LossNotFallingThresholds()
    overfitting: OverfittingThresholds = OverfittingThresholds()
    overtraining: OvertrainingThresholds = OvertrainingThresholds()
    confused_classes: ConfusedClassesThresholds = ConfusedClassesThresholds()
    stalled_training: StalledTrainingThresholds = StalledTrainingThresholds()
    class_imbalance: ClassImbalanceThresholds = ClassImbalanceThresholds()
    weak_teacher: WeakTeacherThresholds = WeakTeacherThresholds()
    vanishing_loss_term: VanishingLossTermThresholds = VanishingLossTermThresholds()
    low_recorded_mass: LowRecordedMassThresholds = LowRecordedMassThresholds()
