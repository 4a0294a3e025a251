"""The state that the routes of one server share."""

from dataclasses import dataclass, field
from time import monotonic, time

from foreword.drafters.config import SpeculationSetting, check_request_setting
from foreword.errors import RequestError
from foreword.server.admission import Admission
from foreword.server.api.bodies import IgnoredFieldLog
from foreword.server.api.pacing import PaceMemory
from foreword.server.api.prompts import PromptEncoder
from foreword.server.errors import ApiError
from foreword.server.metrics import Metrics
from foreword.server.settings import ServerSettings
from foreword.wire.supervisor import Supervisor


def check_speculation(override: SpeculationSetting, settings: ServerSettings) -> SpeculationSetting:
    """Return a request's speculation setting; raise 400 if the server does not allow it."""
    try:
        check_request_setting(override, settings.speculation, settings.methods)
    except RequestError as error:
        raise ApiError(400, str(error), param="speculation") from None
    return override


@dataclass
class ServerContext:
    """State of one server."""

    settings: ServerSettings
    engine: Supervisor
    prompts: PromptEncoder
    admission: Admission
    metrics: Metrics
    started: float = field(default_factory=monotonic)  # on the monotonic clock, for the uptime
    started_at: int = field(default_factory=lambda: int(time()))  # seconds since 1970
    pace: PaceMemory = field(default_factory=PaceMemory)  # mean rate of earlier streams with even pacing
    ignored_fields: IgnoredFieldLog = field(default_factory=IgnoredFieldLog)
    adapters: set[str] = field(init=False)  # loaded LoRA adapters

    def __post_init__(self) -> None:
        self.adapters = set(self.settings.adapters)

    def speculation(self, override: SpeculationSetting) -> SpeculationSetting:
        """Return a request's setting, checked; False if speculation is switched off for all requests."""
        checked = check_speculation(override, self.settings)
        return checked if self.engine.speculating else False

    def adapter(self, name: str | None) -> str:
        """Return the adapter that a request names as its model; empty: the base model."""
        return name if name is not None and name in self.adapters else ""

    def check_model(self, name: str | None) -> None:
        """Raise 404 for a model that this server does not have."""
        if name is not None and name != self.settings.model_name and name not in self.adapters:
            known = ", ".join(map(repr, (self.settings.model_name, *sorted(self.adapters))))
            raise ApiError(
                404,
                f"there is no model {name[:64]!r} here; this server has {known}",
                param="model",
                code="model_not_found",
            )
