"""Creates the engine of `foreword serve --learn` in its process."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from foreword import __version__
from foreword.backends.choice import pick_device
from foreword.drafters.config import SpeculationConfig
from foreword.engine.core import EngineCore
from foreword.engine.engine import Engine
from foreword.engine.loader import LoadedModel
from foreword.errors import RequestError
from foreword.learn.directory import lock_directory
from foreword.learn.learner import HeadLearner
from foreword.learn.policy import METHOD, drafter_with, policy_document, write_policy
from foreword.learn.process import StartTrainer, start_trainer
from foreword.learn.rollout import VersionRollouts
from foreword.learn.settings import LearnSettings
from foreword.learn.stored_texts import read_texts, store_texts
from foreword.learn.texts import ServedTexts
from foreword.learn.training import Trainee, Trainings
from foreword.learn.versions import Versions, remove_tree
from foreword.learn.work import OrderedWork
from foreword.models.heads.shipped import head_named
from foreword.paths import user_path
from foreword.progress import StageProgress
from foreword.train.files import identity_of
from foreword.wire import factory
from foreword.wire.frames import Start

_log = logging.getLogger(__name__)


def load_engine(start: Start, on_stage: StageProgress) -> Engine:
    """Load the model and start an engine that learns; `start.learning` has the settings."""
    setup = LearnSetup.prepare(LearnSettings.of(start.learning))
    try:
        config = start.config | setup.engine_config
        return factory.load_engine(msgspec.structs.replace(start, config=config), on_stage, setup.attach)
    except BaseException:
        setup.release()
        raise


@dataclass(frozen=True)
class LearnSetup:
    """A locked directory with an empty policy file, ready for an engine."""

    settings: LearnSettings
    release: Callable[[], None]  # unlocks the directory
    start: StartTrainer = start_trainer
    clock: Callable[[], float] = time.monotonic

    @staticmethod
    def prepare(settings: LearnSettings) -> "LearnSetup":
        """Lock the directory and write a policy file without drafters; raise `RequestError` if it is in use."""
        release = lock_directory(settings.home)
        try:
            # Versions are loaded after the start, into the spare rows of KV pages.
            write_policy(settings.policy_path, policy_document({}, {}, settings))
        except BaseException:
            release()
            raise
        return LearnSetup(settings, release)

    @property
    def engine_config(self) -> dict[str, Any]:
        """Fields of `EngineConfig` for the engine."""
        return {
            "speculation_policy": str(self.settings.policy_path),
            "spare_heads": self.settings.spare_heads,
        }

    def attach(self, loaded: LoadedModel, core: EngineCore) -> None:
        """Give an engine its learner, before its thread starts."""
        controller = core.speculation_monitor.policy_file
        assert controller is not None  # `engine_config` has one
        settings, identity = self.settings, identity_of(loaded.checkpoint)
        device, default = str(core.target.device), core.drafters.default_config
        work = OrderedWork()
        environment = f"{__version__} {device}"
        versions = Versions(
            settings.home, identity, environment, lambda path: work.add(lambda: remove_tree(path))
        )
        texts = restored_texts(settings, identity, time.time)
        trainee = Trainee(
            str(loaded.checkpoint.path),
            identity,
            settings.device or device,
            _is_same(settings.device, device),
        )
        trainings = Trainings(settings, trainee, self.start, self.clock, work)
        configure, forget_prefixes = partial(drafter_with, default), core.cache.clear_prefix_cache
        rollouts = VersionRollouts(versions, controller, settings, self.clock, configure, forget_prefixes)
        _log.info("learning: %d versions of the head in %s", len(versions.all), settings.home)
        core.learner = HeadLearner(
            settings,
            texts,
            trainings,
            rollouts,
            first_head(default),
            self.clock,
            time.time,
            self.release,
        )


def restored_texts(settings: LearnSettings, identity: str, wall_clock: Callable[[], float]) -> ServedTexts:
    """Return the texts to begin with: stored ones, if they are to be kept."""
    texts = ServedTexts(settings, wall_clock)
    if settings.keeps_texts:
        stored = read_texts(settings.home / "texts", identity, settings.takes_part)
        for text in stored:
            texts.put(text)
        if len(texts) < len(stored):  # texts beyond the limits leave the disk as well
            store_texts(settings.home / "texts", texts, identity)
    return texts


def _is_same(device: str, other: str) -> bool:
    """Return whether both name the same device; empty: the engine's."""
    if not device:
        return True
    one, two = pick_device(device), pick_device(other)
    return (one.type, one.index or 0) == (two.type, two.index or 0)


def first_head(default: SpeculationConfig | None) -> Path | None:
    """Return the directory of the EAGLE-3 head in a configuration; None: it has none."""
    if default is None or METHOD not in default.method:
        return None
    name = str(dict(default.options)["model"])
    path = head_named(name) or user_path(name)
    if not path.is_dir():
        raise RequestError(f"--learn: the head {path} is not a directory; download it first")
    return path
