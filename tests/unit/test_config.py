import json
import re
from pathlib import Path

import pytest

from trainer import config
from trainer.config.settings import DistSettings, DkdSettings, HardSettings, KlSettings
from trainer.graph import STAGES
from trainer.io.base_models import Section
from trainer.io.errors import SettingsError


@pytest.mark.parametrize("recipe", sorted(config.recipes()))
def test_every_recipe_loads_and_says_what_it_is(recipe):
    settings = config.resolve(recipe)
    assert config.validate(config.Settings, settings.model_dump()) == settings
    assert len(config.recipes()[recipe]) > 20


@pytest.mark.parametrize("recipe", sorted(config.recipes()))
def test_a_recipe_states_only_what_differs_from_the_defaults(recipe):
    defaults = {name: value for name, value, _, _ in config.walk(config.Settings())}

    def stated(values, prefix=""):
        for key, value in values.items():
            name = f"{prefix}{key}"
            if isinstance(value, dict) and not name.endswith(".args"):
                yield from stated(value, f"{name}.")
            else:
                yield name, value

    same = {name: value for name, value in stated(config.load_recipe(recipe)) if defaults[name] == value}
    assert not {name for name in same if not name.endswith("architecture")}


def test_overrides_change_the_recipe_and_keep_the_rest_of_a_group():
    settings = config.resolve("digits", "pretrain.mae.views.min_scale=0.5 distill.student.args.depth=3")
    assert settings.pretrain.mae.views == config.resolve("digits").pretrain.mae.views.model_copy(
        update={"min_scale": 0.5}
    )
    assert settings.distill.student.args == config.resolve("digits").distill.student.args | {"depth": 3}


def test_the_documented_command_names_further_teachers():
    """As `make run` hands its SET on: a text, in which a quotation mark is escaped."""
    text = (Path(__file__).parents[2] / "docs/distillation.md").read_text()
    commands = re.findall(r"make run SET='(.*further_teachers.*)'", text)
    assert len(commands) == 2
    for command in commands:
        assert config.resolve("digits", command).distill.further_teachers == ("/models/second",)


def test_defaults_of_a_part_survive_an_override_of_another():
    assert config.resolve("", "pretrain.mae.views.flip=false").pretrain.mae.views.min_scale == 0.2


DKD = DkdSettings(beta=7)


@pytest.mark.parametrize(
    ("overrides", "logit"),
    [
        ("", KlSettings(temperature=3.0, standardize=True)),
        ("distill.logit.standardize=false", KlSettings(temperature=3.0)),
        ("distill.logit.loss=kl", KlSettings(temperature=3.0, standardize=True)),
        ("distill.logit.loss=hard", HardSettings()),
        ("distill.logit.beta=7 distill.logit.loss=dkd", DkdSettings(temperature=3.0, standardize=True, beta=7)),
        (['distill.logit={loss="dkd",beta=7}'], DKD),
        ("""'distill.logit={loss="dkd",beta=7}'""", DKD),
        (['distill.logit={loss="dkd"}', "distill.logit.beta=7"], DKD),
        ("distill.logit={}", KlSettings()),
    ],
)
def test_the_kind_of_logit_loss_decides_which_settings_there_are(overrides, logit, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[distill.logit]\ntemperature = 3\nstandardize = true\n")
    assert config.resolve(str(recipe), overrides).distill.logit == logit


def test_own_settings_of_a_replaced_logit_loss_are_dropped(tmp_path):
    """Also where the other loss has one of the same name, with another meaning."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[distill.logit]\nloss = "dkd"\nalpha = 2\nbeta = 3\ntemperature = 4\n')
    for loss, expected in {
        "dist": DistSettings(temperature=4),
        "kl": KlSettings(temperature=4),
        "hard": HardSettings(),
    }.items():
        assert config.resolve(str(recipe), f"distill.logit.loss={loss}").distill.logit == expected
    recipe.write_text('[distill.logit]\nloss = "hard"\ntemperature = 4\n')
    with pytest.raises(SettingsError, match=r"distill.logit: temperature is 4, but loss is hard"):
        config.resolve(str(recipe))


def test_overrides_are_text_or_toml():
    parsed = config.parse_overrides(
        "a=1 b=0.5 c=true d=plain e=imagefolder:/a/b 'f=two words' g=[1,2] h=\"1\" i=1e-3 j="
    )
    assert parsed == {
        "a": 1, "b": 0.5, "c": True, "d": "plain", "e": "imagefolder:/a/b", "f": "two words", "g": [1, 2], "h": 1,
        "i": 1e-3, "j": "",
    }  # fmt: skip


@pytest.mark.parametrize("value", ["2024", "1.0", "true", "2024-11-27", "1e3", '"2024"'])
def test_what_looks_like_a_number_is_text_where_a_setting_is(value):
    settings = config.resolve("", [f"tracking.experiment={value}", "register.alias=7"])
    assert (settings.tracking.experiment, settings.register.alias) == (value.strip('"'), "7")


def test_a_number_in_a_recipe_is_to_be_quoted(tmp_path):
    (tmp_path / "mine.toml").write_text("tracking.experiment = 2024\n")
    with pytest.raises(SettingsError, match=r'^tracking\.experiment must be text, got 2024; quote it: "2024"$'):
        config.resolve(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("distill.student.args=depth=2", "quote it, as in 'distill.student.args={depth=2}'"),
        ("distill.blocks=3=7", "'distill.blocks={3=7}'"),
        ("distill.low_resolution=epochs=1", "'distill.low_resolution={epochs=1}'"),
        ("distill.student.args={depth=2,", "quote the whole"),
        ("evaluate.latency_batch_sizes=[1,", "quote the whole"),
        ("pretrain.label_map={a=b}", 'texts within it are quoted, {A="text"}'),
        ("run.seed=99999999999999999999", "needs more than 64 bits"),
    ],
)
def test_what_a_shell_makes_of_braces_and_spaces_is_recognized(word, advice):
    with pytest.raises(SettingsError, match=f"^override {re.escape(repr(word))}: .*{re.escape(advice)}"):
        config.resolve("digits", [word])


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("data.source", "imagefolder:~/photos", "imagefolder:HOME/photos"),
        ("data.source", "manifest:~/list.csv", "manifest:HOME/list.csv"),
        ("data.attributes", "~/table.csv", "HOME/table.csv"),
        ("pretrain.weights", "~", "HOME"),
        ("distill.weights", "~/model", "HOME/model"),
        ("tracking.uri", "sqlite:///~/mlflow.db", "sqlite:///HOME/mlflow.db"),
        ("tune.elsewhere", '["~/tuning", "s3://b/~/tuning"]', '["HOME/tuning", "s3://b/~/tuning"]'),
        ("data.source", "imagefolder:/a/~/b", "imagefolder:/a/~/b"),
        ("distill.weights", "~nobody-here/model", "~nobody-here/model"),
    ],
)
def test_home_stands_for_a_tilde_wherever_a_place_is_set(name, given, expected, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    wanted = expected.replace("HOME", "/home/me")
    assert config.resolve("", [f"{name}={given}"]) == config.resolve("", [f"{name}={wanted}"])
    if "HOME" not in expected:
        assert given in str(config.resolve("", [f"{name}={given}"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("evaluate.latency_batch_sizes=[]", "evaluate.latency_batch_sizes must be a list that is not empty"),
        ("distill.student.args=[1]", "distill.student.args must be a group, such as {NAME=VALUE}"),
    ],
)
def test_what_a_list_or_a_group_must_be_is_said(override, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        config.resolve("digits", [override])


def test_a_run_needs_a_recipe():
    with pytest.raises(SettingsError, match=r"^no recipe is named; name one of digits, "):
        config.resolve_run("")


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_recipe_of_an_editor_for_windows(tmp_path, encoding):
    file = tmp_path / "mine.toml"
    file.write_bytes('[tracking]\r\nexperiment = "café"\r\n'.encode(encoding))
    if encoding == "utf-8-sig":
        assert config.resolve(str(file)).tracking.experiment == "café"
        return
    with pytest.raises(SettingsError, match=r"mine\.toml: is not UTF-8 text .*; save it as UTF-8$"):
        config.resolve(str(file))


def test_a_recipe_that_is_missing_is_named_with_its_neighbors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flowers.toml").write_text("")
    with pytest.raises(SettingsError, match=rf"^unknown recipe 'flower.toml' in {tmp_path}; did you mean flowers.toml"):
        config.resolve("flower.toml")


def test_seed_and_loading_are_inherited_unless_given():
    settings = config.resolve(
        "", "run.seed=7 data.workers=5 data.decode_on=cuda distill.seed=1 pretrain.workers=0 reinforce.decode_on=cpu"
    )
    assert (settings.pretrain.seed, settings.reinforce.seed, settings.distill.seed) == (7, 7, 1)
    assert (settings.pretrain.workers, settings.reinforce.workers, settings.distill.workers) == (0, 5, 5)
    assert (settings.pretrain.decode_on, settings.reinforce.decode_on) == ("cuda", "cpu")
    assert config.resolve("", "data.workers=auto").distill.workers == "auto"


def test_what_is_recorded_is_what_the_student_will_see():
    settings = config.resolve("digits", "distill.teacher=recorded distill.views.mixup=0.5")
    assert settings.reinforce.augmentation == settings.distill.views
    assert settings.reinforce.unlabeled is True
    assert settings.tune.reinforce.unlabeled is True
    assert config.resolve("digits", "distill.unlabeled=false").reinforce.unlabeled is False
    assert config.resolve("digits", "reinforce.augmentation.mixup=0.5").reinforce.augmentation.mixup == 0.5


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        ("", (True, False, False)),
        ("distill.teacher=recorded", (True, True, False)),
        ("distill.teacher=recorded distill.logit_weight=0 distill.label_weight=1", (False, False, False)),
        ("distill.logit_weight=0 distill.feature_weight=1", (True, False, False)),
        ("distill.logit.loss=hard", (True, False, False)),
        ("distill.logit.loss=dkd", (True, False, True)),
        ("distill.logit.loss=dist", (True, False, True)),
        ("distill.logit.standardize=true", (True, False, True)),
        ("distill.logit.loss=dkd distill.logit_weight=0", (False, False, False)),
    ],
)
def test_a_distillation_says_what_it_needs_of_the_teacher(overrides, needs):
    distill = config.resolve("digits", overrides).distill
    assert (distill.needs_teacher, distill.reads_recording, distill.needs_all_logits) == needs


def test_a_stage_gets_its_own_section_only():
    settings, changed = config.resolve("digits"), config.resolve("digits", "distill.logit.temperature=9 data.workers=3")
    assert settings.for_stage("prepare") == changed.for_stage("prepare")
    assert settings.for_stage("evaluate") == changed.for_stage("evaluate")
    assert settings.for_stage("distill") != changed.for_stage("distill")
    for name, stage in STAGES.items():
        values = json.loads(json.dumps(settings.for_stage(name)))
        assert isinstance(config.validate_section(stage.section, values), type(getattr(settings, stage.section)))


WRONG = {
    "distill.temprature=2": r"unknown setting distill.temprature; did you mean distill.logit.temperature",
    "temperature=2": r"unknown setting temperature; did you mean distill.logit.temperature",
    "distill.logit.temperature=-1": r"distill.logit.temperature must be > 0.*, got -1",
    "distill.epochs=2.5": r"distill.epochs must be a whole number, got 2.5",
    "distill.epochs=many": r"distill.epochs must be a whole number, got 'many'",
    "data.fit=squeeze": r"data.fit must be 'crop' or 'stretch', got 'squeeze'",
    "distill.zero=perhaps": r"distill.zero must be true or false, got 'perhaps'",
    "distill=3": r"distill is a group of settings and cannot be 3",
    "distill.logit.temperature.x=3": r"distill.logit.temperature",
    "distill.logit_weight=0 distill.label_weight=0": r"distill: logit_weight and label_weight are both 0.*give one of them a weight",
    "distill.kl_weight=1": r"unknown setting distill.kl_weight; did you mean distill\.weights or distill\.token_weight or",
    "distill.logit.temperature=3 distill.logit.loss=hard": r"distill.logit: temperature is 3, but loss is hard, which has none; leave",
    "distill.logit.alpha=2": r"distill.logit: alpha is 2, but loss is kl, .* leave distill.logit.alpha out, or set distill.logit.loss=dkd",
    "tune.distill.epochs=2": r"^tune.distill.epochs is a copy that a run makes of distill.epochs; set that$",
    "tune.budget_usd=2 pretrain.watch={log_steps=true}": r"^pretrain.watch.log_steps is a copy .* of profile.log_steps; set that\n"
    r"tune.budget_usd is a copy that a run makes of run.budget_usd; set that$",
    "tune.enabled=true tune.distill={}": r"^tune.distill is a copy that a run makes of distill; set that$",
    "distll.epochs=3": r"unknown setting distll.epochs; did you mean distill.epochs",
    "search.spcae={distill.drop_path=0.1}": r"unknown setting search.spcae; did you mean search.space",
    "budget_usd=5": r"unknown setting budget_usd; did you mean run.budget_usd or search.budget_usd",
    "search.gate={min_accuracy=0.9}": r"^search.gate.min_accuracy is a copy that a run makes of evaluate.gate.min_accuracy; set that$",
    "distill.logit.alhpa=2": r"unknown setting distill.logit.alhpa; did you mean distill.logit.alpha",
    "distill.logit=dkd": r"distill.logit is a group of settings and cannot be 'dkd'; set one of its members",
    "distill.logit.loss=mse": r"distill.logit.loss must be 'kl', 'hard', 'dkd' or 'dist', got 'mse'",
    "distill.teacher=offline": r"distill.teacher must be 'online' or 'recorded', got 'offline'",
    "distill.logit.loss=dkd distill.views.mixup=0.8": r"distill: logit.loss is dkd, .* views.cutmix mixes them; set both to 0",
    "distill.logit.loss=dkd distill.logit.alpha=0 distill.logit.beta=0": r"distill: logit.loss is dkd, but logit.alpha and logit",
    "distill.logit.loss=dist distill.logit.beta=0 distill.logit.gamma=0": r"distill: logit.loss is dist, but logit.beta and logit.gamma",
    "distill.logit.loss=hard distill.logit.standardize=true": (
        r"distill.logit: standardize is True, but loss is hard, which has none; leave distill.logit.standardize out, or set "
        r"distill.logit.loss=kl or dkd or dist"
    ),
    "distill.head=probe": r"distill: head is probe, .* but logit_weight=0.9 and label_weight=0.1; set distill.logit_weight=0 and",
    "distill.token_weight=1 distill.student.args={patch_drop_rate=0.5}": r"distill: token_weight is 1, but .* drops patches in training",
    "distill.block_weight=1": r"distill: blocks is \{\}, but block_weight is 1; give both",
    "distill.blocks={3=7}": r"distill: blocks is \{3: 7\}, but block_weight is 0; give both",
    "distill.blocks={3=-1} distill.block_weight=1": r"distill\.blocks\.3 must be >= 0, got -1",
    "distill.blocks={3=7} distill.block_weight=1 distill.teacher=recorded": r"blocks give is not recorded; set distill\.teacher=online",
    "distill.distillation_token=true distill.label_weight=0": r"distillation_token is true, but .* label_weight 0, .*; give both a weight",
    "distill.head=probe distill.logit_weight=0 distill.label_weight=0": r"head is probe, but feature_weight and similarity_weight are 0",
    "distill.head=probe distill.logit_weight=0 distill.label_weight=0 distill.feature_weight=1 distill.labeled_share=0.5": (
        r"distill: head is probe, .* but labeled_share is 0\.5; set distill.labeled_share=0"
    ),
    "pretrain.head=none": r"pretrain: head is none, .* but finetune.epochs is 60; set pretrain.finetune.epochs=0, or head=classes",
    "pretrain.head=probe": r"pretrain: head is probe, so the classifier alone is fitted, but finetune.epochs is 60; set pretrain.finetune",
    "pretrain.head=none pretrain.finetune.epochs=0 pretrain.mae.epochs=0": (
        r"pretrain: head is none, weights is empty and mae.epochs is 0, so the teacher would have learned nothing; give weights"
    ),
    "pretrain.head=none pretrain.finetune.epochs=0 pretrain.weights=x pretrain.label_map={a=1}": (
        r"pretrain: head is none, so no row of it can be chosen by label_map; leave label_map out"
    ),
    "pretrain.mae.low_resolution={epochs=1,image_size=8}": r"pretrain.mae: low_resolution is not for a masked autoencoder",
    "distill.low_resolution.epochs=3": (
        r"distill.low_resolution: low_resolution.epochs is 3, but low_resolution.image_size is 0; give both, or neither"
    ),
    "distill.low_resolution={epochs=9,image_size=8} distill.epochs=9": (
        r"distill: low_resolution.epochs is 9 of 9 epochs, so none is left at the network's own resolution"
    ),
    "pretrain.mae.mask_ratio=1": r"pretrain.mae.mask_ratio must be < 1.*, got 1",
    "distill.logit.temperature=nan": r"distill.logit.temperature must be a finite number",
    "evaluate.latency_batch_sizes=[4,0]": r"evaluate.latency_batch_sizes.1 must be >= 1, got 0",
    "epochs": r"override 'epochs': is not key=value",
    "=3": r"override '=3': is not key=value",
    "a='b": r"close the quotation",
    "data.source.x=3": r"override data.source.x: source is a value|data.source must be text",
}


@pytest.mark.parametrize("overrides", WRONG)
def test_a_wrong_setting_is_named_with_its_value_and_what_is_allowed(overrides):
    with pytest.raises(SettingsError, match=WRONG[overrides]):
        config.resolve("digits", overrides)


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        ("", True),
        ("distill.unlabeled=false", False),
        ("distill.logit_weight=0", False),
        ("distill.logit_weight=0 distill.feature_weight=1", True),
    ],
)
def test_images_without_labels_are_read_where_a_teacher_speaks_of_them(overrides, reads):
    assert config.resolve("digits", overrides).distill.reads_unlabeled is reads


def test_a_run_whose_stages_do_not_fit_is_refused_with_all_that_differs():
    weights = "distill.feature_weight=2 distill.token_weight=1"
    overrides = f"{weights} reinforce.augmentation.min_scale=0.1 reinforce.decode_on=cuda reinforce.unlabeled=false"
    config.resolve_run("digits", overrides)
    config.resolve(
        "digits", f"{overrides} distill.teacher=recorded"
    )  # a single stage may have been recorded for otherwise
    with pytest.raises(SettingsError) as caught:
        config.resolve_run("digits", f"{overrides} distill.teacher=recorded")
    features, tokens, views, unlabeled, decoder = str(caught.value).splitlines()
    assert "distill.feature_weight is 2, but reinforce.features is false; set reinforce.features=true" in features
    assert "distill.token_weight is 1, but reinforce.tokens is false" in tokens
    assert "min_scale (0.1, not 0.6), flip (True, not False)" in views
    assert "reinforce.unlabeled is false, but distill.unlabeled is true" in unlabeled
    assert "reinforce.decode_on is cuda, but distill.decode_on is cpu" in decoder


HEADLESS = "pretrain.head=none pretrain.finetune.epochs=0"
"""A teacher that is pretrained without labels, and taken as it is."""


def test_logits_of_a_teacher_without_a_head_are_refused_before_it_is_made():
    config.resolve("digits", HEADLESS)  # a single stage may have another teacher
    config.resolve_run("digits", f"{HEADLESS} distill.logit_weight=0 distill.feature_weight=1")
    with pytest.raises(SettingsError) as caught:
        config.resolve_run("digits", HEADLESS)
    assert "distill.logit_weight is 0.9, but pretrain.head is none, so the teacher has no logits; set" in str(
        caught.value
    )


def test_a_recording_without_the_embedding_is_refused_before_it_is_made():
    learns = "distill.head=probe distill.logit_weight=0 distill.label_weight=0 distill.feature_weight=1"
    config.resolve_run("digits", f"{HEADLESS} {learns} distill.teacher=recorded reinforce.features=true")
    with pytest.raises(
        SettingsError, match=r"feature_weight is 1, but reinforce\.features is false; set reinforce\.features=true"
    ):
        config.resolve_run("digits", f"{HEADLESS} {learns} distill.teacher=recorded")


def test_all_wrong_settings_are_reported_at_once():
    with pytest.raises(SettingsError) as caught:
        config.resolve("digits", "distill.logit.temperature=-1 data.image_size=2")
    assert len(str(caught.value).splitlines()) == 2


def test_a_wrong_section_of_a_stage_is_named_in_full():
    with pytest.raises(SettingsError, match=r"^distill.logit.temperature must be > 0"):
        config.validate(config.DistillSettings, {"logit": {"temperature": 0}}, prefix="distill")


def test_an_unknown_recipe_is_answered_with_the_nearest(tmp_path):
    with pytest.raises(
        SettingsError,
        match=r"unknown recipe 'digit'; did you mean digits\?; known: digits, few-labels, food101, from-scratch",
    ):
        config.resolve("digit")
    with pytest.raises(SettingsError, match=r"unknown recipe '.*mine.toml'"):
        config.resolve(str(tmp_path / "mine.toml"))


def test_a_recipe_of_ones_own_is_a_toml_file(tmp_path):
    (tmp_path / "mine.toml").write_text("# Mine.\n[distill.logit]\ntemperature = 7\n")
    assert config.resolve(str(tmp_path / "mine.toml")).distill.logit.temperature == 7
    (tmp_path / "broken.toml").write_text("[distill")
    with pytest.raises(SettingsError, match=r"broken.toml: cannot be read"):
        config.resolve(str(tmp_path / "broken.toml"))


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        *((name, []) for name in config.recipes()),
        (
            "digits",
            [
                *("search.enabled=true", 'search.space={"distill.drop_path"="uniform(0,0.2)"}', "warm_up.enabled=true"),
                *(
                    "run.budget_hours=3",
                    'profile.stop_on=["exploding_gradients"]',
                    'pretrain.teacher.args={a="b \\"c",d=1.5}',
                ),
                *("distill.blocks={3=7}", "distill.block_weight=1", "distill.logit.loss=dkd"),
            ],
        ),
    ],
    ids=str,
)
def test_resolved_settings_are_written_as_a_recipe(tmp_path, recipe, overrides):
    settings = config.resolve(recipe, overrides)
    (tmp_path / "written.toml").write_text(config.recipe_of(settings))
    named = f"register.model_name={settings.register.model_name}"  # else it follows the recipe's name
    assert config.resolve(str(tmp_path / "written.toml"), [named]) == settings
    assert config.resolve_text(config.recipe_of(settings)) == settings


def test_the_students_of_each_recipe_have_a_name_of_their_own(tmp_path):
    recipe = tmp_path / "shelves.toml"
    recipe.write_text("")
    names = [config.resolve(one).register.model_name for one in ("digits", "grocery", str(recipe), "")]
    assert names == ["vit-student-digits", "vit-student-grocery", "vit-student-shelves", "vit-student"]
    recipe.write_text('register.model_name = "food"')
    assert config.resolve(str(recipe)).register.model_name == "food"


def test_every_setting_has_a_type_and_a_meaning():
    for name, _, kind, meaning in config.walk(config.Settings):
        assert kind, name
        assert len(meaning) > 10, name


def test_the_learning_rate_grows_with_the_batch():
    assert config.TrainingSettings(base_learning_rate=1e-3, batch_size=1024).peak_learning_rate() == pytest.approx(4e-3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.workers=foo", "data.workers must be a whole number or auto, got 'foo'"),
        ("data.workers=-1", "data.workers must be >= 0 or auto, got -1"),
        ("distill.workers=1.5", "distill.workers must be a whole number or auto, got 1.5"),
        (
            "pretrain.teacher.args.depth=[1]",
            "pretrain.teacher.args.depth must be a whole number or a number or text or true or false, got [1]",
        ),
        ("distill.views_on=gpu", "distill.views_on must be 'auto', 'cpu' or 'device', got 'gpu'"),
    ],
)
def test_a_setting_with_alternatives_is_explained_in_one_message(override, message):
    with pytest.raises(SettingsError) as caught:
        config.resolve("digits", override)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("overrides", "top_k", "kept"),
    [
        ("", 10, 10),
        ("distill.logit.loss=dkd", "all", 81),
        ("distill.logit.standardize=true", "all", 81),
        ("distill.logit.loss=dkd reinforce.top_k=20", 20, 20),
        ("reinforce.top_k=all", "all", 81),
        ("reinforce.top_k=200", 200, 81),
    ],
)
def test_as_many_logits_are_recorded_as_the_distillation_needs(overrides, top_k, kept):
    settings = config.resolve("", overrides).reinforce
    assert (settings.top_k, settings.logits(81)) == (top_k, kept)


def test_a_batch_is_clamped_to_the_images_that_there_are_and_the_learning_rate_follows_it():
    given = config.resolve("digits", "distill.batch_size=1024 distill.base_learning_rate=0.001").distill
    assert given.for_images(1024) is given
    fitted = given.for_images(640)
    assert fitted == given.model_copy(update={"batch_size": 640})
    assert fitted.peak_learning_rate() == pytest.approx(0.0025)
    assert given.for_images(643, parts=4).batch_size == 640
    assert given.for_images(3, parts=4).batch_size == 3
    assert given.clamp_warning("distill", 640, fitted) == (
        "distill.batch_size = 1024 is larger than the 640 images to train on, and a step sees none of them twice; it becomes 640, and the "
        "learning rate is scaled for that"
    )


def test_what_a_run_copies_is_known_as_a_copy():
    """A group of settings that is empty until a run resolves it would be replaced by defaults as a whole where one of them is given."""
    empty = {name for name, value, *_ in config.walk(config.Settings()) if value is None}
    kinds = {name: config._kind(name.split(".")) for name in empty}
    groups = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)}
    # That one is checked against what it would be a copy of (trainer/config/conflicts.py).
    assert groups - {"reinforce.augmentation"} == {
        name for name in config._COPIES if not name.startswith("tune.budget_")
    }
    assert all(config.copied_from(f"{name}.x") == f"{original}.x" for name, original in config._COPIES.items())
