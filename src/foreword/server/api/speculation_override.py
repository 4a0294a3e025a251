"""What a request may change about guessing, on this server."""

from foreword.drafters.config import SpeculationSetting, check_request_setting
from foreword.errors import RequestError
from foreword.server.errors import ApiError
from foreword.server.settings import ServerSettings


def check_speculation(override: SpeculationSetting, settings: ServerSettings) -> SpeculationSetting:
    """The override as the engine takes it, or 400."""
    try:
        check_request_setting(override, settings.speculation, settings.methods)
    except RequestError as error:
        raise ApiError(400, str(error), param="speculation") from None
    return override
