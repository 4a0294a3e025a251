"""Puts the HTTP side together."""

from fastapi import FastAPI

from foreword import __version__
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.prompts import PromptEncoder
from foreword.server.api.routes.foreword import foreword_routes
from foreword.server.api.routes.openai import openai_routes
from foreword.server.context import ServerContext
from foreword.server.errors import install_error_handlers
from foreword.server.ops.admission import Admission
from foreword.server.ops.auth import AuthMiddleware
from foreword.server.ops.head import HeadMiddleware
from foreword.server.ops.metrics import Metrics
from foreword.server.ops.origins import OriginMiddleware
from foreword.server.ops.request_log import RequestLogMiddleware
from foreword.server.ops.routes import ops_routes
from foreword.server.ops.speculation_routes import speculation_routes
from foreword.server.page.routes import page_routes
from foreword.server.settings import ServerSettings
from foreword.wire.client import EngineClient


def create_context(settings: ServerSettings, engine: EngineClient, tokenizer: Tokenizer) -> ServerContext:
    """The parts of a server around an engine."""
    return ServerContext(
        settings,
        engine,
        PromptEncoder(tokenizer, settings),
        Admission(settings.limits),
        Metrics(settings.model_name),
    )


def create_app(context: ServerContext) -> FastAPI:
    """The ASGI application. Its page loads nothing from elsewhere; `/openapi.json` describes the rest."""
    app = FastAPI(title="Foreword", version=__version__, docs_url=None, redoc_url=None)
    app.include_router(openai_routes(context))
    app.include_router(foreword_routes(context))
    app.include_router(ops_routes(context))
    app.include_router(speculation_routes(context))
    app.include_router(page_routes(context))
    install_error_handlers(app, context.metrics.note_refusal)
    # The last that is added sees a request first.
    app.add_middleware(HeadMiddleware)
    app.add_middleware(AuthMiddleware, settings=context.settings, on_refusal=context.metrics.note_refusal)
    app.add_middleware(OriginMiddleware, settings=context.settings, on_refusal=context.metrics.note_refusal)
    app.add_middleware(RequestLogMiddleware, settings=context.settings)
    return app
