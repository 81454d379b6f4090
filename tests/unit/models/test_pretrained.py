"""Weights of timm's hub, as they lie in its client's cache, loaded as from the hub: at a revision, with arguments, for other classes; of a
copy of the hub's file; and real ones of installed packages."""

import hashlib
from dataclasses import replace

import huggingface_hub.constants
import pytest
import safetensors.torch
import timm
import torch
from sklearn.datasets import load_sample_image
from timm.data import ImageNetInfo

from trainer import config
from trainer.config import PretrainSettings, TimmWeights
from trainer.io import artifacts, storage
from trainer.io.errors import ModelError, SettingsError, StorageAwayError
from trainer.models import networks, pretrained

ARGS = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
NAME = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
HEADLESS = "vit_base_patch16_224.mae"
CLIP = "vit_base_patch32_clip_224.openai"
OLD, NEW = "0" * 40, "1" * 40
IMAGES = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
SYNSETS = ImageNetInfo("imagenet-1k").label_names()


def publish(cache, name, revision, *, seed=0, **args):
    """Put weights into the cache of the hub's client, as if they had been fetched from timm's repository; gives the network."""
    torch.manual_seed(seed)
    network = timm.create_model(name, **ARGS | args)
    repository = cache / f"models--{timm.get_pretrained_cfg(name).hf_hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    safetensors.torch.save_file(network.state_dict(), snapshot / "model.safetensors")
    return network.eval()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache of the hub's client, empty, and no hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def load(name=NAME, revision="", **args):
    model = config.ModelSettings(architecture=name, args=ARGS | args)
    return pretrained.load(TimmWeights(name, revision), model).eval()


def test_weights_come_with_head_and_class_names(cache):
    network = publish(cache, NAME, OLD)
    model = load()
    assert model.card.labels == tuple(SYNSETS)
    assert model.card.mean == (0.5, 0.5, 0.5)
    assert torch.equal(model(IMAGES), network(model.preprocess(IMAGES)))


def test_exactly_the_named_revision_is_loaded_and_recorded(cache, tmp_path):
    old, new = publish(cache, NAME, OLD, seed=0), publish(cache, NAME, NEW, seed=1)
    for revision, network in ((OLD, old), (NEW, new)):
        model = load(revision=revision)
        assert torch.equal(model.network.head.weight, network.head.weight)
        assert model.card.origin == networks.Origin(
            name=f"timm:{NAME}", repository=f"timm/{NAME}", revision=revision, license="apache-2.0"
        )
    with artifacts.create(tmp_path / "model", "model", settings={}) as draft:
        networks.save(networks.with_labels(model, ["a", "b"]), draft.path)
    assert networks.load(tmp_path / "model").card.origin == model.card.origin
    with pytest.raises(ModelError, match=rf"timm:{NAME}@{'2' * 40} cannot be built"):
        load(revision="2" * 40)


def test_arguments_reach_timm_which_interpolates_the_positions(cache):
    publish(cache, NAME, OLD)
    model = load(img_size=32)
    assert model.card.image_size == 32
    assert model.network.pos_embed.shape[1] == 1 + (32 // 8) ** 2
    assert model(IMAGES).shape == (2, 1000)
    sized = config.ModelSettings(
        architecture=NAME, args={key: value for key, value in ARGS.items() if key != "img_size"}, image_size=32
    )
    assert torch.equal(pretrained.load(TimmWeights(NAME, ""), sized).eval()(IMAGES), model(IMAGES))
    with artifacts.create(cache.parent / "model", "model", settings={}) as draft:
        networks.save(model, draft.path)
    assert torch.equal(networks.load(cache.parent / "model")(IMAGES), model(IMAGES))


@pytest.mark.parametrize("args", [{"depth": 2}, {"embed_dim": 32}, {"class_token": False, "global_pool": "avg"}])
def test_arguments_that_drop_weights_are_refused(cache, args):
    publish(cache, NAME, OLD)
    with pytest.raises(
        ModelError, match=rf"timm:{NAME}@{OLD} cannot be built with the arguments .*(key\(s\)|size mismatch).*leave all"
    ):
        load(**args)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vit_tiny_patch16_224.nobody", r"timm:vit_tiny_patch16_224.nobody: timm has no such weights.*vit_tiny"),
        ("test_vit4", "timm:test_vit4: timm has no such weights"),
        ("nothing", "architecture 'nothing': timm has no such model"),
        ("hf-hub:someone/model", "timm has no such model"),
        (NAME, rf"timm:{NAME} cannot be built .*check the network"),
    ],
)
def test_weights_that_are_not_there(cache, name, message):
    with pytest.raises(ModelError, match=message):
        load(name)


def test_weights_without_classes_of_known_name_match_no_data_set(cache):
    publish(cache, HEADLESS, OLD)
    publish(cache, CLIP, OLD)
    assert load(HEADLESS).card.labels == ()
    labels = load(CLIP).card.labels
    assert labels[:2] == (f"timm:{CLIP}[0]", f"timm:{CLIP}[1]")
    with pytest.raises(
        ModelError, match=r"x: of the data set's 2 classes 2 are not among its .*, first 'a'.*label_map"
    ):
        pretrained.with_classes(load(CLIP), ["a", "b"], {}, "x")
    with pytest.raises(ModelError, match=r"x: has no head, so it knows no class.*pretrain\.head=none"):
        pretrained.with_classes(load(HEADLESS), ["a", "b"], {}, "x")


def test_a_new_head_for_weights_that_have_none(cache):
    publish(cache, HEADLESS, OLD)
    model = load(HEADLESS)
    adapted = networks.with_labels(model, ["a", "b"])
    assert adapted(IMAGES).shape == (2, 2)
    assert torch.equal(adapted.network.patch_embed.proj.weight, model.network.patch_embed.proj.weight)


def test_classes_are_chosen_in_the_data_sets_order(cache):
    publish(cache, NAME, OLD)
    model = load()
    chosen = pretrained.with_classes(model, [SYNSETS[7], SYNSETS[2]], {}, "x").eval()
    assert torch.allclose(chosen(IMAGES), model(IMAGES)[:, [7, 2]], atol=1e-6)
    assert chosen.card == replace(model.card, labels=(SYNSETS[7], SYNSETS[2]))
    whole = pretrained.with_classes(model, SYNSETS[::-1], {}, "x").eval()
    assert torch.allclose(whole(IMAGES), model(IMAGES).flip(1), atol=1e-6)


def test_label_map(cache):
    publish(cache, NAME, OLD)
    model = load()
    label_map = {"hen": f" {SYNSETS[8]}\u00a0", "tench": 0}
    chosen = pretrained.with_classes(model, ["hen", SYNSETS[5], "tench"], label_map, "x").eval()
    assert torch.allclose(chosen(IMAGES), model(IMAGES)[:, [8, 5, 0]], atol=1e-6)
    for name, value in model.network.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(value, chosen.network.state_dict()[name])
    # A label map names classes as people read them.
    settings = PretrainSettings(weights="x", label_map={"cafe\u0301 ": 1})
    assert settings.label_map == {"caf\xe9": 1}
    with pytest.raises(ValueError, match=r"U\+200B ZERO WIDTH SPACE, which cannot be seen"):
        PretrainSettings(weights="x", label_map={"cafe\u200b": 1})
    with pytest.raises(ValueError, match="two of its names read the same"):
        PretrainSettings(weights="x", label_map={"cafe": 1, "cafe ": 2})


@pytest.mark.parametrize(
    ("label_map", "message"),
    [
        ({"hen": 1000, "cock": 1}, r"1 are not among its 1000 \('n01440764', .*\), first 'hen' as 1000"),
        ({"hen": "chicken", "cock": 1}, r"first 'hen' as 'chicken'"),
        ({"hen": 8}, r"first 'cock'; say with"),
        ({"hen": 8, "cock": 7, "fox": 3}, r"pretrain\.label_map: the data set has no class 'fox'"),
        ({"hen": 8, "cock": SYNSETS[8]}, rf"x: 'hen', 'cock' would be the same class of it, '{SYNSETS[8]}'; let it be"),
    ],
)
def test_a_label_map_that_makes_no_sense(cache, label_map, message):
    publish(cache, NAME, OLD)
    with pytest.raises(ModelError, match=message):
        pretrained.with_classes(load(), ["hen", "cock"], label_map, "x")


def test_heads_of_other_networks(cache):
    torch.manual_seed(0)
    for architecture, images in (("resnet10t", 64), ("deit_tiny_distilled_patch16_224", 224), ("convnext_atto", 64)):
        model = networks.create(config.ModelSettings(architecture=architecture), ["a", "b", "c"]).eval()
        picture = torch.randint(0, 256, (1, 3, images, images), dtype=torch.uint8)
        chosen = pretrained.with_classes(model, ["c", "a"], {}, "x").eval()
        assert torch.allclose(chosen(picture), model(picture)[:, [2, 0]], atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            f"pretrain.weights=timm:{NAME} pretrain.teacher.architecture=resnet18",
            r"weights is 'timm:.*', but teacher.architecture is 'resnet18'",
        ),
        (
            f"pretrain.weights=timm:{NAME} pretrain.teacher.architecture=vit_tiny_patch16_224.augreg_in21k",
            "set pretrain.teacher.architecture=",
        ),
        (
            f"distill.weights=timm:{NAME} distill.student.architecture=resnet18",
            r"weights is 'timm:.*', but student.architecture is 'resnet18'.*distill.student",
        ),
        (
            "pretrain.weights=x pretrain.weights_file=y.safetensors",
            r"weights_file is 'y.safetensors', .* but weights is 'x'.*pretrain.weights=timm",
        ),
        (
            f"distill.weights=timm:{NAME} distill.student.architecture={NAME} distill.weights_file=model.pth",
            r"weights_file is 'model.pth', but only a .safetensors file is read",
        ),
        ("pretrain.weights=x pretrain.label_map={a=-1}", r"pretrain\.label_map\.a must be >= 0"),
        ("pretrain.weights=x pretrain.label_map={a=true}", r"pretrain\.label_map\.a must be a whole number or text"),
    ],
)
def test_settings_that_contradict_one_another(overrides, message):
    with pytest.raises(SettingsError, match=message):
        config.resolve("", overrides)


def test_weights_that_are_in_no_repository_have_no_revision():
    name = "legacy_seresnet18.in1k"
    settings = config.WeightsSettings(weights=f"timm:{name}@{OLD}")
    for use in (pretrained.check, pretrained.start):
        with pytest.raises(ModelError, match=rf"^timm:{name}@{OLD}: .* from https://\S+, .* no revisions.*{OLD}"):
            use(settings, config.ModelSettings(architecture=name))
    assert pretrained.check(config.WeightsSettings(weights=f"timm:{name}"), config.ModelSettings(architecture=name))


# ---------------------------------------------------------------------------------------------------------------------
# A copy of the hub's file


@pytest.fixture
def file(cache):
    """The file of the hub's repository, beside an empty cache."""
    publish(cache, NAME, OLD)
    found = next(cache.glob("**/model.safetensors"))
    return found.rename(cache.parent / "copied.safetensors")


def settings_for(**fields):
    return config.WeightsSettings(**fields), config.ModelSettings(architecture=NAME, args=ARGS)


def test_a_copied_file_is_like_the_hubs(file):
    settings, model = settings_for(weights=f"timm:{NAME}", weights_file=str(file))
    loaded, fingerprint = pretrained.start(settings, model)
    tensors = safetensors.torch.load_file(file)
    assert all(torch.equal(value, tensors[name]) for name, value in loaded.network.state_dict().items())
    assert loaded.card.labels == tuple(SYNSETS)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    assert fingerprint == sha256 == artifacts.weights_version(settings.weights, settings.weights_file)
    assert loaded.card.origin == networks.Origin(
        name=f"timm:{NAME}", repository=str(file), revision=sha256, license="apache-2.0"
    )
    assert "state_dict" not in loaded.network.pretrained_cfg
    assert pretrained.check(settings, model).card.labels == tuple(SYNSETS)


def test_licenses(cache):
    publish(cache, HEADLESS, OLD)
    model = config.ModelSettings(architecture=HEADLESS, args=ARGS)
    for accepted in ("", "apache-2.0"):
        settings = config.WeightsSettings(weights=f"timm:{HEADLESS}", accept_license=accepted)
        for use in (pretrained.check, pretrained.start):
            with pytest.raises(
                ModelError,
                match=rf"^timm:{HEADLESS}: its license is cc-by-nc-4\.0, .* \(https://huggingface\.co/timm/{HEADLESS}\), .*"
                r"set accept_license=cc-by-nc-4\.0 beside weights$",
            ):
                use(settings, model)
    settings = config.WeightsSettings(weights=f"timm:{HEADLESS}", accept_license="cc-by-nc-4.0")
    pretrained.check(settings, model)
    loaded, _ = pretrained.start(settings, model)
    assert loaded.card.origin.license == "cc-by-nc-4.0"
    # A license that timm does not know is no open one.
    name = next(name for name in timm.list_pretrained() if not timm.get_pretrained_cfg(name).license)
    with pytest.raises(ModelError, match=r"its license is unknown, .* set accept_license=unknown"):
        pretrained.check(
            config.WeightsSettings(weights=f"timm:{name}"), config.ModelSettings(architecture=name.partition(".")[0])
        )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file; fetch it again"),
        (b"version https://git-lfs.github.com/spec/v1", "is not a safetensors file; fetch it again"),
        (b"\x80\x02}q\x00." + bytes(100), "is not a safetensors file"),
    ],
)
def test_file_that_is_none_is_refused_before_anything_starts(file, content, message):
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        pretrained.check(*settings_for(weights=f"timm:{NAME}", weights_file=str(file)))


def test_weights_in_a_store(object_store, file):
    # Its error says so, and is not turned into one of the model.
    object_store.answer(503, times=storage.ATTEMPTS)
    with pytest.raises(StorageAwayError):
        pretrained.check(*settings_for(weights=f"timm:{NAME}", weights_file=object_store.uri("copy.safetensors")))
    # A file in a store is the same.
    uri = object_store.uri("copied.safetensors")
    storage.write_bytes(uri, file.read_bytes())
    (near, fingerprint), (far, version) = (
        pretrained.start(*settings_for(weights=f"timm:{NAME}", weights_file=place)) for place in (str(file), uri)
    )
    assert fingerprint == version == artifacts.weights_version(f"timm:{NAME}", uri)
    assert torch.equal(near.eval()(IMAGES), far.eval()(IMAGES))


def test_a_file_of_another_model_is_refused(file):
    safetensors.torch.save_file({"weight": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match=rf"timm:{NAME} cannot be built .*check that {file} is its file of the hub"):
        pretrained.start(*settings_for(weights=f"timm:{NAME}", weights_file=str(file)))


# ---------------------------------------------------------------------------------------------------------------------
# Packages: the real weights


@pytest.mark.parametrize("name", pretrained.WEIGHTS_PACKAGES)
def test_the_weights_of_a_package_know_imagenet(name):
    """The photo is of a Chinese temple: `palace` to each of them."""
    settings, model = config.WeightsSettings(weights=f"package:{name}"), config.ModelSettings(architecture=name)
    loaded, fingerprint = pretrained.start(settings, model)
    package = pretrained.WEIGHTS_PACKAGES[name]
    assert loaded.card.labels == tuple(SYNSETS)
    assert loaded.card.origin == networks.Origin(
        name=f"package:{name}", repository=package.url, revision=package.sha256, license="apache-2.0"
    )
    assert fingerprint
    assert pretrained.check(settings, model).card == replace(loaded.card, origin=None)
    photo = torch.from_numpy(load_sample_image("china.jpg").copy()).permute(2, 0, 1)[None, :, :, 106:533].contiguous()
    with torch.inference_mode():
        likeliest = int(loaded.eval()(photo).argmax())
    assert SYNSETS[likeliest] == "n03877845"


def test_package_that_is_not_installed_or_damaged_is_named(monkeypatch, tmp_path):
    name = "tf_efficientnet_lite0"
    package = pretrained.WEIGHTS_PACKAGES[name]
    settings, model = config.WeightsSettings(weights=f"package:{name}"), config.ModelSettings(architecture=name)
    monkeypatch.setitem(pretrained.WEIGHTS_PACKAGES, name, replace(package, distribution="not-installed"))
    with pytest.raises(ModelError, match=r"package not-installed is not installed"):
        pretrained.check(settings, model)
    monkeypatch.setitem(pretrained.WEIGHTS_PACKAGES, name, replace(package, sha256="0" * 64))
    with pytest.raises(ModelError, match=r"\.pth is not the file that is known, by its checksum"):
        pretrained.start(settings, model)
    monkeypatch.setitem(pretrained.WEIGHTS_PACKAGES, name, replace(package, file="nowhere"))
    with pytest.raises(ModelError, match=r"nowhere cannot be read \(.*\)"):
        pretrained.check(settings, model)
