"""Routes of our own beside OpenAI's: `/generate`, `/tokenize`, `/detokenize`."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foreword.server.api.entry import answer_request, body_of, json_answer, takes
from foreword.server.api.generate import check_generate, generate_job
from foreword.server.api.types.openai_types import DetokenizeRequest, GenerateRequest, TokenizeRequest
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError


def foreword_routes(context: ServerContext) -> APIRouter:
    """In the library's words, and tokens as in vLLM."""
    router = APIRouter()

    @router.post("/generate", openapi_extra=takes(GenerateRequest))
    async def generate(request: Request) -> Response:
        """Answer a prompt, in the library's words."""
        return await answer_request(context, request, GenerateRequest, check_generate, generate_job)

    @router.post("/tokenize", openapi_extra=takes(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text or a conversation."""
        body = await body_of(context, request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.messages is not None:
            shown = [message.as_template_sees_it() for message in body.messages]
            ids = await context.prompts.chat(shown, add_generation_prompt=body.add_generation_prompt)
        else:
            ids = await context.prompts.text(body.prompt or "", body)
        longest = context.max_model_len
        known = {} if longest is None else {"max_model_len": longest}
        return json_answer({"tokens": ids, "count": len(ids)} | known)

    @router.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        body = await body_of(context, request, DetokenizeRequest)
        text = await context.prompts.back(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return json_answer({"prompt": text})

    return router
