"""The HTTP surface: an aiohttp application that joins the handler groups to their paths. No policy of its own.

`build_app` makes it. It must be served by `edge.build_runner`, whose cancellation on disconnect is what ends a
request when its client has left, in the queue, in prefill and in decode. A handler raises `Refused`; how that looks to
the client is `edge`'s business. What a route is for stands beside its registration: /openapi.json is made of that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from janus_server.admission import Admission
from janus_server.api import admin as records
from janus_server.api import answers, bodies, embeddings, messages, responses, tokenize
from janus_server.api.bodies import Limits
from janus_server.api.cluster import ClusterView
from janus_server.api.openapi import About, Access
from janus_server.applications import Applications
from janus_server.http.admin import PATTERN, Admin
from janus_server.http.admit import Door
from janus_server.http.dashboard import Dashboard
from janus_server.http.docs import Docs
from janus_server.http.edge import Guard, stamp
from janus_server.http.embed import Embed
from janus_server.http.generate import Generate
from janus_server.http.nodes import Nodes, add_nodes
from janus_server.http.routes import Routes
from janus_server.http.service import Service
from janus_server.http.status import Status
from janus_server.http.tokenize import Tokenize
from janus_server.http.translate import Translate
from janus_server.metrics import Metrics

if TYPE_CHECKING:
    from janus_server.node import Node


def build_app(
    node: Node, *, metrics: Metrics, limits: Limits, admission: Admission, applications: Applications | None = None
) -> web.Application:
    """The web application with all its routes; serve it with `edge.build_runner`."""
    door = Door(admission, metrics, limits.request_s)
    service = Service(node, metrics, limits, door, applications or Applications())
    app = web.Application(middlewares=[Guard(metrics).guard], client_max_size=limits.body_bytes)
    routes = Routes(app.router)
    _add_status(routes, Status(service))
    generate = Generate(service)
    _add_generate(routes, generate)
    _add_embed(routes, Embed(service, generate))
    _add_translate(routes, Translate(service, generate))
    _add_tokenize(routes, Tokenize(service))
    admin = Admin(service)
    _add_admin(routes, admin)
    add_nodes(routes, Nodes(service))
    _add_docs(routes, Docs(service, routes.operations), Dashboard(service))
    app.on_shutdown.append(admin.end)
    app.on_response_prepare.append(stamp)
    app.cleanup_ctx.append(service.threads)
    return app


def _add_status(routes: Routes, status: Status) -> None:
    alive = About(tag="status", summary="Whether the process is alive", answer=answers.Alive, access=Access.OPEN)
    ready = About(
        tag="status", summary="Whether requests can be served", details="503 with the reason while they cannot",
        answer=answers.Alive,
    )  # fmt: skip
    routes.add_get("/health", status.health, alive)
    routes.add_get("/ready", status.ready, ready)
    routes.add_get("/version", status.version, About(tag="status", summary="The version", answer=answers.Version))
    routes.add_get("/metrics", status.metrics, About(tag="status", summary="Metrics for Prometheus", kind="text/plain"))
    models = About(tag="models", summary="The served models", answer=answers.ModelList)
    routes.add_get("/v1/models", status.list_models, models)
    routes.add_get(
        "/v1/models/{model:.+}", status.show_model,
        About(tag="models", summary="One served model", answer=answers.Model),
    )  # fmt: skip


def _add_generate(routes: Routes, generate: Generate) -> None:
    routes.add_post("/v1/chat/completions", generate.chat, About(
        tag="generate", summary="Answer a conversation",
        body=bodies.ChatBody, answer=answers.ChatCompletion, event=answers.ChatCompletionChunk,
        example={"model": "", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 100, "stream": True},
    ))  # fmt: skip
    routes.add_post("/v1/completions", generate.complete, About(
        tag="generate", summary="Continue a text",
        body=bodies.CompletionBody, answer=answers.Completion, event=answers.Completion,
        example={"model": "", "prompt": "The quick brown fox", "max_tokens": 20, "stream": True},
    ))  # fmt: skip


def _add_embed(routes: Routes, embed: Embed) -> None:
    routes.add_post("/v1/embeddings", embed.embed, About(
        tag="generate", summary="Turn texts into vectors",
        details="Made of the model's last hidden states, which every model has; how well they compare depends on it",
        body=embeddings.EmbeddingBody, answer=embeddings.EmbeddingList,
        example={"model": "", "input": ["The quick brown fox", "jumps over the lazy dog"]},
    ))  # fmt: skip


def _add_translate(routes: Routes, translate: Translate) -> None:
    routes.add_post("/v1/responses", translate.respond, About(
        tag="generate", summary="Answer a conversation, in the form of OpenAI's Responses",
        details="Stateless: nothing is kept between calls",
        body=responses.ResponsesBody, answer=answers.ResponseAnswer, event=answers.TypedEvent,
        example={"model": "", "input": "Hello!", "max_output_tokens": 100},
    ))  # fmt: skip
    count = About(
        tag="tokens", summary="Count the tokens of a response's input", body=responses.ResponsesBody,
        answer=answers.InputTokens, example={"model": "", "input": "Hello!"},
    )  # fmt: skip
    routes.add_post("/v1/responses/input_tokens", translate.count_response, count)
    stored = About(tag="generate", summary="No response is stored: always 404")
    for path in ("/v1/responses/{id}", "/v1/responses/{id}/{what}"):
        routes.add_get(path, translate.stored_response, stored)
        routes.add_post(path, translate.stored_response, stored)
        routes.add_delete(path, translate.stored_response, stored)
    routes.add_post("/v1/messages", translate.message, About(
        tag="generate", summary="Answer a conversation, in the form of Anthropic's Messages",
        body=messages.MessagesBody, answer=answers.MessageAnswer, event=answers.TypedEvent, error=answers.MessagesError,
        example={"model": "", "max_tokens": 100, "messages": [{"role": "user", "content": "Hello!"}]},
    ))  # fmt: skip
    count = About(
        tag="tokens", summary="Count the tokens of a message's input", body=messages.CountBody,
        answer=answers.InputTokens, error=answers.MessagesError,
        example={"model": "", "messages": [{"role": "user", "content": "Hello!"}]},
    )  # fmt: skip
    routes.add_post("/v1/messages/count_tokens", translate.count_message, count)


def _add_tokenize(routes: Routes, handlers: Tokenize) -> None:
    encode = About(
        tag="tokens", summary="Turn a text or a conversation into tokens", details="As generation would encode it",
        body=tokenize.TokenizeBody, one_of=("prompt", "messages"), answer=tokenize.Tokenized,
        example={"model": "", "prompt": "The quick brown fox", "return_token_strs": True},
    )  # fmt: skip
    decode = About(
        tag="tokens", summary="Turn tokens into their text", body=tokenize.DetokenizeBody,
        answer=tokenize.Detokenized, example={"model": "", "tokens": [1, 2, 3]},
    )  # fmt: skip
    info = About(
        tag="tokens", summary="What the tokenizer is", answer=tokenize.TokenizerInfo,
        query=(("model", "The name of a served model; may be left out where one is served"),),
    )  # fmt: skip
    for prefix in ("", "/v1"):
        routes.add_post(f"{prefix}/tokenize", handlers.tokenize, encode)
        routes.add_post(f"{prefix}/detokenize", handlers.detokenize, decode)
        routes.add_get(f"{prefix}/tokenizer_info", handlers.info, info)


def _add_admin(routes: Routes, admin: Admin) -> None:
    routes.add_get("/admin/models", admin.models, About(
        tag="admin", summary="Where every model stands, and what is being done with it",
        answer=records.ManagedList, error=records.AdminError, access=Access.ADMIN,
    ))  # fmt: skip
    routes.add_post(f"/admin/models/{{model:.+}}/{{wish:{PATTERN}}}", admin.wish, About(
        tag="admin", summary="Load, wake, sleep, evict, pin or unpin a model",
        details="200 when nothing is left to do, 202 while there is; asking twice does no harm. 409 where the model's "
        "state forbids it, with that state in the error",
        query=(("wait", "Seconds to wait until it is done: then 200, 409 when it was given up, 504 when it is late"),),
        answer=records.Wished, also=(202,), error=records.AdminError, statuses=(409, 504), access=Access.ADMIN,
    ))  # fmt: skip
    routes.add_post("/admin/models/{model:.+}/fork", admin.fork, About(
        tag="admin", summary="Copy a model's weights from another server of this user on this machine",
        details="Both need a --node name. 404 where no node is called so, 409 where it does not hold the model as this "
        "server would. A copy that fails on the way is rolled back and the model brought in from what is here",
        query=(("wait", "As for the other wishes"),), body=records.ForkBody, example={"source": "n1"},
        answer=records.Wished, also=(202,), error=records.AdminError, statuses=(409, 504), access=Access.ADMIN,
    ))  # fmt: skip
    routes.add_get("/admin/peers", admin.peers, About(
        tag="admin", summary="The other servers of this user on this machine, and what can be copied from them",
        answer=records.PeerList, error=records.AdminError, access=Access.ADMIN,
    ))  # fmt: skip
    routes.add_get("/admin/cluster", admin.cluster, About(
        tag="admin", summary="Every node of the cluster: its memory, its models, its requests, and what was decided",
        details="Any node answers for all of them; a server that is alone is a cluster of one. What was seen is shared "
        "for half a second. A node that does not answer has a trouble. Counts only grow: take differences",
        query=(("past", "true: with what came to each node in the last ten minutes"),),
        answer=ClusterView, error=records.AdminError, access=Access.ADMIN,
    ))  # fmt: skip
    routes.add_get("/admin/memory", admin.memory, About(
        tag="admin", summary="Every page of memory by its holder, and how well it is used",
        answer=records.MemoryMap, error=records.AdminError, access=Access.ADMIN,
    ))  # fmt: skip
    routes.add_get("/admin/events", admin.events, About(
        tag="admin", summary="What is ordered, how far it is and how it ends, as server-sent events",
        details="It goes on until the reader leaves or the server stops. A reader that is slow misses events, progress "
        "first, and is told how many",
        kind="text/event-stream", event=records.ModelEvent, error=records.AdminError, access=Access.ADMIN,
    ))  # fmt: skip


def _add_docs(routes: Routes, docs: Docs, dashboard: Dashboard) -> None:
    document = About(tag="status", summary="This document", details="OpenAPI 3.1")
    page = About(tag="status", summary="A page that shows it", kind="text/html", access=Access.OPEN)
    routes.add_get("/openapi.json", docs.document, document)
    routes.add_get("/docs", docs.page, page)
    cluster = About(tag="status", summary="A page that shows the cluster", kind="text/html", access=Access.OPEN)
    routes.add_get("/dashboard", dashboard.page, cluster)
